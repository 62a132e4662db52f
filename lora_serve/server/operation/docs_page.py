"""GET /docs: the OpenAPI document as a page. Plain HTML: no script, nothing from elsewhere."""

from __future__ import annotations

import asyncio
import functools
import html
from collections.abc import Collection, Mapping
from typing import Any

from aiohttp import web

from lora_serve.server.operation.openapi import document_of
from lora_serve.server.route import ROUTES, RouteTable


async def get_docs(request: web.Request) -> web.StreamResponse:
    """The OpenAPI document as a page to read."""
    page = await asyncio.to_thread(_page_of_routes, request.app[ROUTES])
    response = web.Response(text=page, content_type="text/html")
    response.headers["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
    return response


@functools.cache
def _page_of_routes(table: RouteTable) -> str:
    return page_of(document_of(table))


def page_of(document: Mapping[str, Any]) -> str:
    """The document's operations and the fields of their bodies."""
    schemas = document["components"]["schemas"]
    parts = [
        f"<h2>{html.escape(method.upper())} {html.escape(path)}</h2>{_says(operation)}{_fields(operation, schemas)}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    title = html.escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>'
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>{"".join(parts)}'
        "</body></html>\n"
    )


def _says(operation: Mapping[str, Any]) -> str:
    """What the call does, in a line and then at more length."""
    words = ". ".join(operation[part] for part in ("summary", "description") if part in operation)
    return f"<p>{html.escape(words)}</p>" if words else ""


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """A table of the query and of the body; one for each schema that the body may fit."""
    query = {f"?{item['name']}=": item["schema"] for item in operation.get("parameters", ()) if item["in"] == "query"}
    bodies = _body_schemas(operation, schemas)
    return "<p>or</p>".join(_table(query | body.get("properties", {}), body.get("required", ())) for body in bodies)


def _table(fields: Mapping[str, Any], needed: Collection[str]) -> str:
    rows = [
        f"<tr><td><code>{html.escape(name)}</code></td><td>{'required' if name in needed else 'optional'}</td>"
        f"<td>{html.escape(_kind(field))}</td></tr>"
        for name, field in fields.items()
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _body_schemas(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of the first media type that the body may have."""
    kinds = [*operation.get("requestBody", {}).get("content", {}).values()]
    schema: dict[str, Any] = kinds[0].get("schema", {}) if kinds else {}
    options = schema.get("anyOf", [schema])
    return [schemas[option["$ref"].rpartition("/")[2]] if "$ref" in option else option for option in options]


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    return str(field.get("type") or field.get("$ref", "any").rpartition("/")[2])
