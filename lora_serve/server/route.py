"""One route of the API, with all that router, guards, audit log, /openapi.json and tests know about it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from pydantic import BaseModel

from lora_serve.core.request import Task
from lora_serve.server.answers import WireError

Refusal = Callable[[WireError, str], Any]  # the body of an error, and the request's id

AnswerKind = type[Any]  # a Struct, or a TypedDict
JSON = "application/json"
EVENTS = "text/event-stream"
_CHANGING = frozenset((hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_PATCH, hdrs.METH_DELETE))


class Access(enum.Enum):
    """The callers that a route lets in."""

    PUBLIC = "anybody, without a key"
    ANY_KEY = "whoever has a key"
    MODELS = "whoever may use the models, whatever state the server is in"
    INFERENCE = "whoever may use the models, while the server is ready and its queue has room"
    TENANT_ADMIN = "the admin, and a tenant's own admin within that tenant"
    ADMIN = "the admin only, whatever `--auth` says"


@dataclass(frozen=True, slots=True)
class OtherBody:
    """A body that is not JSON, and headers that belong to it, in OpenAPI's words."""

    content: Mapping[str, Any]
    headers: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, who may call them, and the handler that answers."""

    method: str
    path: str  # as /openapi.json shows it; `{id}` and `{file}` may hold slashes
    access: Access
    handler: Handler
    body: type[BaseModel] | tuple[type[BaseModel], ...] | OtherBody | None = None  # the schemas, one of which checks it
    query: type[BaseModel] | None = None
    answers: tuple[str, ...] = (JSON,)  # media types of a success
    answer: AnswerKind | tuple[AnswerKind, ...] | None = None  # an answer in JSON: one of these
    event: AnswerKind | tuple[AnswerKind, ...] | None = None  # one event of a stream
    tasks: tuple[Task, ...] = ()  # of the served model; empty: any
    refusal: Refusal | None = None  # the form of its errors; None: OpenAI's
    is_probe: bool = False  # called every few seconds: logged only if its status changes, never traced

    @property
    def schemas(self) -> tuple[type[BaseModel], ...]:
        """The schemas, one of which checks the body in JSON; empty: there is no such body."""
        if self.body is None or isinstance(self.body, OtherBody):
            return ()
        return self.body if isinstance(self.body, tuple) else (self.body,)

    @property
    def pattern(self) -> str:
        """The path as aiohttp takes it. An id ends in no slash, so that one behind it is the path's."""
        return self.path.rstrip("/").replace("{id}", "{id:.*[^/]}").replace("{file}", "{file:.*[^/]}")

    @property
    def is_page(self) -> bool:
        """True if people read the answer in a browser, to which a link on any site may bring them."""
        return "text/html" in self.answers

    @property
    def is_act(self) -> bool:
        """True if a call is an admin's act, which gets a line in the audit log."""
        return self.access in (Access.ADMIN, Access.TENANT_ADMIN) and self.method in _CHANGING

    @property
    def is_deletion(self) -> bool:
        """True for an act that frees space, and so is tried on a full disk too."""
        return self.is_act and (self.method == "DELETE" or "unload" in self.path)  # vLLM's is a POST


class RouteTable:
    """The routes of an application, in the order in which the router tries them."""

    def __init__(self, *routes: Route) -> None:
        self.routes = routes
        self.probe_paths = frozenset(route.path for route in routes if route.is_probe)
        self._by_call = {(route.method, route.path): route for route in routes}

    def find(self, request: web.Request) -> Route | None:
        """The route that the router chose; None if there is nothing at the URL, or nothing for the method."""
        resource = request.match_info.route.resource
        method = hdrs.METH_GET if request.method == hdrs.METH_HEAD else request.method
        return None if resource is None else self._by_call.get((method, resource.canonical.rstrip("/") or "/"))


ROUTES = web.AppKey("routes", RouteTable)
