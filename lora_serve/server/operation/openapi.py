"""GET /openapi.json, made of the table of routes and of the schemas that check their bodies and queries.

Making it takes a tenth of a second: that is done once, and on a thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lora_serve import __version__
from lora_serve.server.route import EVENTS, JSON, ROUTES, Access, OtherBody, Route, RouteTable

_Mode = Literal["validation", "serialization"]
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
                "reasons": {"type": "array", "items": {"type": "string"}},
            },
        }
    },
}


async def get_openapi(request: web.Request) -> web.StreamResponse:
    """The OpenAPI document of every route."""
    return web.json_response(text=await asyncio.to_thread(_text_of, request.app[ROUTES]))


@functools.cache
def _text_of(table: RouteTable) -> str:
    return json.dumps(document_of(table))


def document_of(table: RouteTable) -> dict[str, Any]:
    """OpenAPI 3.1 of every route of the table."""
    asked = dict.fromkeys(schema for route in table.routes for schema in route.schemas)
    given = dict.fromkeys(schema for route in table.routes for schema in (route.answer, route.event) if schema)
    models: list[tuple[type[BaseModel], _Mode]] = [(model, "validation") for model in asked]
    models += [(model, "serialization") for model in given]
    refs, definitions = models_json_schema(models, ref_template=_REFS)
    schemas = {model: refs[model, mode] for model, mode in models}
    paths: dict[str, dict[str, Any]] = {}
    for route in table.routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lora_serve", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: Mapping[type[BaseModel], Mapping[str, Any]]) -> dict[str, Any]:
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


def _answer(route: Route, media: str, schemas: Mapping[type[BaseModel], Mapping[str, Any]]) -> dict[str, Any]:
    model = {JSON: route.answer, EVENTS: route.event}.get(media)
    return {"schema": {"type": "string"} if model is None else schemas[model]}


def _content(route: Route, schemas: Mapping[type[BaseModel], Mapping[str, Any]]) -> Mapping[str, Any]:
    if isinstance(route.body, OtherBody):
        return route.body.content
    options = [schemas[schema] for schema in route.schemas]
    if not options:
        return {}
    return {JSON: {"schema": options[0] if len(options) == 1 else {"anyOf": options}}}


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
