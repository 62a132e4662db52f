"""GET /openapi.json, made of the table of routes and of the schemas that check their bodies and queries.

Making it takes a tenth of a second: that is done once, and on a thread.
"""

from __future__ import annotations

import asyncio
import functools
import html
import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lora_serve import __version__
from lora_serve.server.answers import Error, spaced
from lora_serve.server.route import EVENTS, JSON, ROUTES, Access, OtherBody, Route, RouteTable

_Kind = type[Any]
_Schemas = Mapping[Any, Mapping[str, Any]]  # by the type that is described


class OpenApiDocument(Struct):
    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


_REFS = "#/components/schemas/{model}"
_REFUSAL = {"application/json": {"schema": {"$ref": _REFS.format(model="Error")}}}
_PARAMETER = re.compile(r"{(\w+)}")


async def get_openapi(request: web.Request) -> web.StreamResponse:
    """The OpenAPI document of every route."""
    text = await asyncio.to_thread(_text_of, request.app[ROUTES])
    return web.Response(text=text, content_type=JSON)


@functools.cache
def _text_of(table: RouteTable) -> str:
    return spaced(document_of(table)).decode()


def document_of(table: RouteTable) -> dict[str, Any]:
    """OpenAPI 3.1 of every route of the table."""
    asked = dict.fromkeys(schema for route in table.routes for schema in route.schemas)
    given = dict.fromkeys(kind for route in table.routes for one in (route.answer, route.event) for kind in _all(one))
    refs, definitions = models_json_schema([(model, "validation") for model in asked], ref_template=_REFS)
    schemas: dict[Any, Mapping[str, Any]] = {model: ref for (model, _), ref in refs.items()}
    described, found = msgspec.json.schema_components([*given, Error], ref_template=_REFS.format(model="{name}"))
    components: dict[str, Any] = _readable(found)
    schemas |= dict(zip(given, described, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for route in table.routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lora_serve", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**definitions.get("$defs", {}), **{name: _shown(part) for name, part in components.items()}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _all(kinds: _Kind | tuple[_Kind, ...] | None) -> tuple[_Kind, ...]:
    return kinds if isinstance(kinds, tuple) else (() if kinds is None else (kinds,))


def _shown(component: dict[str, Any]) -> dict[str, Any]:
    """A schema as answers have it: what has a default is there, too; what may be UNSET has none."""
    if "properties" not in component:
        return component
    properties = component["properties"]
    is_there = {*component.get("required", ()), *(name for name, field in properties.items() if "default" in field)}
    shown = {name: {key: item for key, item in field.items() if key != "default"} for name, field in properties.items()}
    return {**component, "properties": shown, "required": [name for name in properties if name in is_there]}


def _readable(part: Any) -> Any:
    """A part of a schema as generators of clients read it: an array has a schema of its items (where a tuple ends is
    said by `maxItems`, too), and a choice of truth values is a boolean.
    """
    if isinstance(part, dict):
        plain = {key: _readable(value) for key, value in part.items()}
        if plain.get("type") == "array":
            plain["items"] = plain.get("items") or {}
        return {"type": "boolean"} if plain.get("enum") in ([True], [False]) else plain
    return [_readable(value) for value in part] if isinstance(part, list) else part


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "tags": [_tag(route)],
        **_words(route),
        "responses": {
            "2XX": {
                "description": "Done",
                "content": {media: _answer(route, media, schemas) for media in route.answers},
            },
            "4XX": {"description": "Refused, in words", "content": _REFUSAL},
            "503": {"description": "Not now; Retry-After says when", "content": _REFUSAL},
        },
    }
    if route.access is not Access.PUBLIC:
        operation["security"] = [{"key": []}]
    headers = route.body.headers if isinstance(route.body, OtherBody) else ()
    if parameters := [*_path_parameters(route.path), *_query_parameters(route.query), *headers]:
        operation["parameters"] = parameters
    if content := _content(route, schemas):
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _words(route: Route) -> dict[str, str]:
    """The handler's docstring: its first line is the summary, the rest of it the description."""
    summary, _, rest = (inspect.getdoc(route.handler) or "").partition("\n")
    rest = " ".join(rest.split())
    return {"summary": summary.removesuffix("."), **({"description": rest} if rest else {})}


def _answer(route: Route, media: str, schemas: _Schemas) -> dict[str, Any]:
    kinds = _all({JSON: route.answer, EVENTS: route.event}.get(media))
    return {"schema": _one_of([schemas[kind] for kind in kinds]) if kinds else {"type": "string"}}


def _content(route: Route, schemas: _Schemas) -> Mapping[str, Any]:
    if isinstance(route.body, OtherBody):
        return route.body.content
    return {JSON: {"schema": _one_of([schemas[schema] for schema in route.schemas])}} if route.schemas else {}


def _one_of(options: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    return options[0] if len(options) == 1 else {"anyOf": options}


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
    """A parameter's schema without references, and without what no query can say: null, and defaults that are no text
    where text is asked for.
    """
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    (option,) = options
    shown = dict(kinds[option["$ref"].rpartition("/")[2]] if "$ref" in option else option)
    if shown.get("type") == "string" and not isinstance(shown.get("default", ""), str):
        del shown["default"]
    return shown


def _tag(route: Route) -> str:
    if route.path.startswith("/admin") or route.path.endswith("lora_adapter"):
        return "admin"
    return "operation" if route.access is Access.PUBLIC else "inference"


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
