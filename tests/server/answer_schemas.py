"""Every answer of the application is one that /openapi.json promises."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs
from aiohttp import web

from lora_serve.server.operation.openapi import document_of
from lora_serve.server.route import JSON
from lora_serve.server.routes import TABLE

EVENTS = "text/event-stream"


@functools.cache
def validators() -> dict[tuple[str, str, str], Any]:
    """(method, path, media type) -> validator of a success; those without a schema of their own are left out."""
    document = document_of(TABLE)
    components = {"components": document["components"]}
    found = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for media, content in operation["responses"]["2XX"]["content"].items():
                if {"$ref", "anyOf"} & content["schema"].keys():
                    schema = {**content["schema"], **components}
                    found[method.upper(), path, media] = jsonschema_rs.Draft202012Validator(schema)
    return found


def faults_of(method: str, path: str, media: str, answer: Any) -> list[str]:
    """What is wrong with an answer, or with one event of a stream."""
    validator = validators().get((method, path, media))
    if validator is None:
        return []
    return [
        f"{method} {path} at {list(error.instance_path)}: {error.message}" for error in validator.iter_errors(answer)
    ]


@dataclass(slots=True)
class AnswerWatch:
    """Looks at every answer of an application before it is sent."""

    faults: list[str] = field(default_factory=list)
    num_checked: int = 0

    def watch(self, app: web.Application) -> None:
        app.on_response_prepare.append(self._check)

    async def _check(self, request: web.Request, response: web.StreamResponse) -> None:
        route = request.match_info.route.resource
        if route is None or not isinstance(response, web.Response) or response.status >= 300:
            return
        if response.content_type == JSON and isinstance(response.body, bytes):
            self.num_checked += 1
            answer = json.loads(response.body)
            self.faults += faults_of(request.method, route.canonical, JSON, answer)
