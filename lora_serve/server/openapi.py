"""GET /openapi.json, made of the routes and of the schemas that check their bodies; GET /docs, a page of it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lora_serve import __version__
from lora_serve.server.schemas.admin import AliasFields, LimitFields, RegisterFields, RouteFields
from lora_serve.server.schemas.chat import ChatFields
from lora_serve.server.schemas.completion import CompletionFields
from lora_serve.server.schemas.pooling import ClassifyFields, EmbeddingFields, RerankFields, ScoreFields
from lora_serve.server.schemas.tenants import ChangeTenantFields, CreateKeyFields, CreateTenantFields
from lora_serve.server.schemas.tokenize import DetokenizeFields, TokenizeTextFields

_BODIES: Mapping[tuple[str, str], type[BaseModel]] = {
    ("POST", "/v1/completions"): CompletionFields,
    ("POST", "/v1/chat/completions"): ChatFields,
    ("POST", "/v1/embeddings"): EmbeddingFields,
    **{("POST", path): ClassifyFields for path in ("/classify", "/v1/classify")},
    **{("POST", path): ScoreFields for path in ("/score", "/v1/score")},
    **{("POST", path): RerankFields for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    ("POST", "/tokenize"): TokenizeTextFields,
    ("POST", "/detokenize"): DetokenizeFields,
    ("POST", "/admin/adapters"): RegisterFields,
    ("PUT", "/admin/adapters/{id}/route"): RouteFields,
    ("PUT", "/admin/aliases/{id}"): AliasFields,
    ("PUT", "/admin/engine"): LimitFields,
    ("POST", "/admin/tenants"): CreateTenantFields,
    ("PATCH", "/admin/tenants/{tenant}"): ChangeTenantFields,
    ("POST", "/admin/tenants/{tenant}/keys"): CreateKeyFields,
}
_OPEN = ("/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/docs")
_REFS = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)}")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def get_openapi(request: web.Request) -> web.StreamResponse:
    return web.json_response(document_of(request.app))


async def get_docs(request: web.Request) -> web.StreamResponse:
    """Plain HTML: no script, nothing from elsewhere."""
    response = web.Response(text=page_of(document_of(request.app)), content_type="text/html")
    response.headers["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
    return response


def document_of(app: web.Application) -> dict[str, Any]:
    """OpenAPI 3.1 of every route of the application."""
    refs, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(_BODIES.values())], ref_template=_REFS
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        if route.method == "HEAD" or route.resource is None:
            continue
        path = route.resource.canonical
        body = _BODIES.get((route.method, path))
        schema = None if body is None else refs[body, "validation"]
        paths.setdefault(path, {})[route.method.lower()] = _operation(route.method, path, schema)
    schemas = {**definitions.get("$defs", {}), "Error": _ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lora_serve", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(method: str, path: str, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "tags": [_tag(path)],
        "responses": {
            "2XX": {"description": "Done"},
            "4XX": {
                "description": "Refused, in words",
                "content": {"application/json": {"schema": {"$ref": _REFS.format(model="Error")}}},
            },
        },
    }
    if path not in _OPEN:
        operation["security"] = [{"key": []}]
    names = _PARAMETER.findall(path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _tag(path: str) -> str:
    if path.startswith("/admin") or path.endswith("lora_adapter"):
        return "admin"
    return "operation" if path in _OPEN else "inference"


def page_of(document: Mapping[str, Any]) -> str:
    """The document's operations and the fields of their bodies."""
    schemas = document["components"]["schemas"]
    parts = [
        f"<h2>{html.escape(method.upper())} {html.escape(path)}</h2>{_fields(operation, schemas)}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    title = html.escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>'
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>{"".join(parts)}'
        "</body></html>\n"
    )


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    if "requestBody" not in operation:
        return ""
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = schemas[reference.rpartition("/")[2]]
    needed = schema.get("required", ())
    rows = [
        f"<tr><td><code>{html.escape(name)}</code></td><td>{'required' if name in needed else 'optional'}</td>"
        f"<td>{html.escape(_kind(field))}</td></tr>"
        for name, field in schema["properties"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    return str(field.get("type") or field.get("$ref", "any").rpartition("/")[2])
