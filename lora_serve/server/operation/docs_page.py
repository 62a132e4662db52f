"""GET /docs: the OpenAPI document as a page. Plain HTML: no script, nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from lora_serve.server.operation.openapi import document_of


async def get_docs(request: web.Request) -> web.StreamResponse:
    response = web.Response(text=page_of(document_of(request.app)), content_type="text/html")
    response.headers["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
    return response


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
    query = {f"?{item['name']}=": item["schema"] for item in operation.get("parameters", ()) if item["in"] == "query"}
    schema = _body_schema(operation, schemas)
    needed = schema.get("required", ())
    rows = [
        f"<tr><td><code>{html.escape(name)}</code></td><td>{'required' if name in needed else 'optional'}</td>"
        f"<td>{html.escape(_kind(field))}</td></tr>"
        for name, field in (query | schema.get("properties", {})).items()
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _body_schema(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Of the first form in which the body may come."""
    kinds = [*operation.get("requestBody", {}).get("content", {}).values()]
    schema: dict[str, Any] = kinds[0].get("schema", {}) if kinds else {}
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    return str(field.get("type") or field.get("$ref", "any").rpartition("/")[2])
