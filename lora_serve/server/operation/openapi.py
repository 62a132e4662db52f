"""GET /openapi.json, made of the routes and of the schemas that check their bodies and queries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lora_serve import __version__
from lora_serve.adapters.checkpoint.digest import CONFIG_NAME, TOKENIZER_NAME, WEIGHTS_NAME
from lora_serve.adapters.http_content import CONTENT_DIGEST
from lora_serve.server.schemas.admin import (
    AliasFields,
    LimitFields,
    LoadLoraFields,
    RegisterFields,
    RouteFields,
    UnloadLoraFields,
)
from lora_serve.server.schemas.chat import ChatFields
from lora_serve.server.schemas.completion import CompletionFields
from lora_serve.server.schemas.pooling import ClassifyFields, EmbeddingFields, RerankFields, ScoreFields
from lora_serve.server.schemas.queries import (
    AdaptersQuery,
    AuditQuery,
    DeletionQuery,
    PageQuery,
    UploadFields,
    UsageQuery,
)
from lora_serve.server.schemas.tenants import ChangeTenantFields, CreateKeyFields, CreateTenantFields, SharingFields
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
    ("PUT", "/admin/adapters/{id}/sharing"): SharingFields,
    ("PUT", "/admin/aliases/{id}"): AliasFields,
    ("PUT", "/admin/engine"): LimitFields,
    ("POST", "/admin/tenants"): CreateTenantFields,
    ("PATCH", "/admin/tenants/{tenant}"): ChangeTenantFields,
    ("POST", "/admin/tenants/{tenant}/keys"): CreateKeyFields,
    ("POST", "/v1/load_lora_adapter"): LoadLoraFields,
    ("POST", "/v1/unload_lora_adapter"): UnloadLoraFields,
}
_QUERIES: Mapping[tuple[str, str], type[BaseModel]] = {
    ("GET", "/admin/adapters"): AdaptersQuery,
    ("PUT", "/admin/adapters/{id}"): UploadFields,
    ("DELETE", "/admin/adapters/{id}"): DeletionQuery,
    ("GET", "/admin/tenants"): PageQuery,
    ("GET", "/admin/usage"): UsageQuery,
    ("GET", "/admin/audit"): AuditQuery,
}
_UPLOAD = {  # PUT /admin/adapters/{id}
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    CONFIG_NAME: {"type": "string", "contentMediaType": "application/json"},
                    WEIGHTS_NAME: {"type": "string", "contentMediaType": "application/octet-stream"},
                    TOKENIZER_NAME: {"type": "string", "contentMediaType": "application/json"},
                    **UploadFields.model_json_schema()["properties"],
                },
                "required": [CONFIG_NAME, WEIGHTS_NAME],
            }
        },
        **{kind: {} for kind in ("application/x-tar", "application/gzip", "application/zip")},
    },
}
_UPLOAD_HEADER = {
    "name": CONTENT_DIGEST,
    "in": "header",
    "description": "RFC 9530, of the body as it is sent: sha-256, sha-512; a body that it does not fit is refused",
    "schema": {"type": "string"},
}
_OPEN = ("/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/docs")
_REFS = "#/components/schemas/{model}"
_REFUSAL = {"application/json": {"schema": {"$ref": _REFS.format(model="Error")}}}
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


def document_of(app: web.Application) -> dict[str, Any]:
    """OpenAPI 3.1 of every route of the application."""
    refs, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(_BODIES.values())], ref_template=_REFS
    )
    bodies = {
        call: {"required": True, "content": {"application/json": {"schema": refs[model, "validation"]}}}
        for call, model in _BODIES.items()
    } | {("PUT", "/admin/adapters/{id}"): _UPLOAD}
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        if route.method != "HEAD" and route.resource is not None:
            path = route.resource.canonical
            body = bodies.get((route.method, path))
            paths.setdefault(path, {})[route.method.lower()] = _operation(route.method, path, body)
    schemas = {**definitions.get("$defs", {}), "Error": _ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lora_serve", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "tags": [_tag(path)],
        "responses": {
            "2XX": {"description": "Done"},
            "4XX": {"description": "Refused, in words", "content": _REFUSAL},
            "503": {"description": "Not now; Retry-After says when", "content": _REFUSAL},
        },
    }
    if path not in _OPEN:
        operation["security"] = [{"key": []}]
    headers = [_UPLOAD_HEADER] if (method, path) == ("PUT", "/admin/adapters/{id}") else []
    if parameters := [*_path_parameters(path), *_query_parameters(_QUERIES.get((method, path))), *headers]:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = body
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = _PARAMETER.findall(path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(query: type[BaseModel] | None) -> list[dict[str, Any]]:
    if query is None:
        return []
    schema = query.model_json_schema()
    kinds = schema.get("$defs", {})
    return [
        {"name": name, "in": "query", "schema": _plain(field, kinds)} for name, field in schema["properties"].items()
    ]


def _plain(field: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's schema without references; what may be left out is never sent as null."""
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    (option,) = options
    return dict(kinds[option["$ref"].rpartition("/")[2]] if "$ref" in option else option)


def _tag(path: str) -> str:
    if path.startswith("/admin") or path.endswith("lora_adapter"):
        return "admin"
    return "operation" if path in _OPEN else "inference"
