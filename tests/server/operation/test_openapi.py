"""GET /openapi.json and /docs: every route is there, bodies are the schemas that check them, the page is only text."""

from __future__ import annotations

import json
import threading
from types import ModuleType
from typing import Any

import aiohttp
import pytest

from lora_serve.core.request import Task
from lora_serve.server.app import build_app
from lora_serve.server.operation import openapi
from lora_serve.server.operation.openapi import document_of, page_of
from lora_serve.server.route import JSON, OtherBody, RouteTable
from lora_serve.server.routes import TABLE
from lora_serve.server.schemas.fields import Fields
from lora_serve.server.schemas.inference import CompletionFields
from tests.server.answer_schemas import EVENTS, faults_of


async def test_document_names_every_route(http: aiohttp.ClientSession, services: Any) -> None:
    """The router's own list: nothing is served that the table does not name."""
    async with http.get("/openapi.json") as answer:
        document = await answer.json()
    routes = [route for route in build_app(services).router.routes() if route.method != "HEAD"]
    assert len(routes) == 2 * len(TABLE.routes) > 70  # each with a slash at its end, and without
    for route in routes:
        assert route.resource is not None
        operation = document["paths"][route.resource.canonical.rstrip("/") or "/"][route.method.lower()]
        assert operation["responses"]


@pytest.mark.parametrize(("path", "module"), [("/openapi.json", openapi), ("/docs", openapi)])
async def test_document_is_made_once_and_not_by_the_event_loop(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, path: str, module: ModuleType
) -> None:
    makers: list[threading.Thread] = []

    def noting(table: RouteTable) -> dict[str, Any]:
        makers.append(threading.current_thread())
        return document_of(table)

    monkeypatch.setattr(module, "document_of", noting)
    for cached in (openapi._text_of, openapi._page_of_routes):
        cached.cache_clear()
    texts = set()
    for _ in range(3):
        async with http.get(path) as answer:
            texts.add(await answer.text())
    assert len(texts) == len(makers) == 1
    assert makers[0] is not threading.current_thread()


def test_body_of_a_call_is_the_schema_that_checks_it() -> None:
    document = document_of(TABLE)
    content = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert set(document["components"]["schemas"][name]["properties"]) == set(CompletionFields.model_fields)
    assert document["components"]["schemas"][name]["required"] == ["prompt"]


async def test_bodies_and_queries_are_checked_by_the_schemas_that_the_table_names(
    admin: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("acme/a")
    async with admin.post("/admin/tenants", json={"name": "acme"}) as answer:
        assert answer.status == 201
    used: list[type[Fields]] = []
    plain = Fields.model_validate.__func__

    def noting(schema: type[Fields], *args: Any, **named: Any) -> Any:
        used.append(schema)
        return plain(schema, *args, **named)

    monkeypatch.setattr(Fields, "model_validate", classmethod(noting))
    for route in TABLE.routes:
        expected = {*route.schemas, *([route.query] if route.query else [])}
        if not expected or isinstance(route.body, OtherBody) or (route.tasks and Task.GENERATE not in route.tasks):
            continue
        used.clear()
        path = route.path.format(id="acme/a", tenant="acme", key="k")
        for body in ({}, {"messages": []}) if route.schemas else (None,):
            async with admin.request(route.method, path, json=body):
                pass
        assert set(used) == expected, route


WITHOUT_BODY = {"pin", "unpin", "prefetch", "evict", "rollback", "ping"}


def test_every_call_that_takes_a_body_says_which() -> None:
    paths = document_of(TABLE)["paths"]
    bare = {
        path.rpartition("/")[2]
        for path, methods in paths.items()
        for method, operation in methods.items()
        if method in ("post", "put", "patch") and "requestBody" not in operation
    }
    assert bare == WITHOUT_BODY


async def test_queries_are_the_schemas_that_check_them(admin: aiohttp.ClientSession) -> None:
    operation = document_of(TABLE)["paths"]["/admin/usage"]["get"]
    fields = {item["name"]: item["schema"] for item in operation["parameters"]}
    assert set(fields) == {"tenant", "adapter", "version", "key", "from", "to", "by", "format"}
    assert fields["format"]["enum"] == ["json", "csv"]
    for query in ("format=xml", "by=colour", "from=soon", "from=9&to=1"):
        async with admin.get(f"/admin/usage?{query}") as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == query.partition("=")[0]


def test_references_lead_somewhere_and_ids_are_given_once() -> None:
    document = document_of(TABLE)
    known = document["components"]["schemas"]
    assert [name for name in known if "." in name] == []  # as two of one name would be called
    for reference in _references(document):
        assert reference.removeprefix("#/components/schemas/") in known
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for item in value.values() for found in _references(item)]
    return [found for item in value for found in _references(item)] if isinstance(value, list) else []


def test_every_operation_says_in_a_line_what_it_does() -> None:
    for path, methods in document_of(TABLE)["paths"].items():
        for method, operation in methods.items():
            summary = operation["summary"]
            assert 5 < len(summary) <= 80, (method, path)
            assert summary[0].isupper(), (method, path)
            assert "handler" not in summary.casefold(), (method, path)
            assert not summary.endswith("."), (method, path)


def test_a_chats_lists_and_objects_have_a_type() -> None:
    properties = document_of(TABLE)["components"]["schemas"]["ChatFields"]["properties"]
    objects = {"type": "array", "items": {"type": "object"}}
    assert properties["messages"].items() >= objects.items()
    assert properties["tools"]["anyOf"] == [objects, {"type": "null"}]
    assert [kind["type"] for kind in properties["response_format"]["anyOf"]] == ["object", "null"]
    assert [kind["type"] for kind in properties["tool_choice"]["anyOf"]] == ["string", "object", "null"]


def test_only_open_doors_need_no_key() -> None:
    paths = document_of(TABLE)["paths"]
    open_doors = {
        path for path, methods in paths.items() for operation in methods.values() if "security" not in operation
    }
    probes = {"/health", "/ping", "/ready", "/version", "/metrics"}
    assert open_doors == probes | {"/", "/openapi.json", "/docs", "/ui", "/ui/about.json", "/ui/{file}"}


async def test_page_runs_no_script_and_loads_nothing(http: aiohttp.ClientSession) -> None:
    async with http.get("/docs") as answer:
        text = await answer.text()
    assert answer.status == 200
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "/v1/chat/completions" in text
    assert "<script" not in text
    assert "http" not in text.replace("HTTP", "").partition("<body>")[0]


def test_what_a_document_says_is_text_on_the_page() -> None:
    info = {"title": "<b>", "version": "1"}
    page = page_of({"info": info, "paths": {"/<i>": {"get": {"summary": "Show <u>"}}}, "components": {"schemas": {}}})
    assert "<b>" not in page
    assert "<i>" not in page
    assert "<p>Show &lt;u&gt;</p>" in page


def test_an_answer_that_is_not_promised_is_a_fault() -> None:
    """The watch over every answer of these tests can find something."""
    assert faults_of("GET", "/version", JSON, {"version": "1", "kernels": None}) == []
    (fault,) = faults_of("GET", "/version", JSON, {"version": 1, "kernels": None})
    assert "version" in fault


def test_every_answer_in_json_has_a_schema() -> None:
    without = [route.path for route in TABLE.routes if JSON in route.answers and route.answer is None]
    assert without == []
    assert [route.path for route in TABLE.routes if (EVENTS in route.answers) != (route.event is not None)] == []


async def test_events_of_streams_are_those_that_the_document_promises(http: aiohttp.ClientSession) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    extra = {"stream": True, "stream_options": options, "logprobs": 1, "max_tokens": 3}
    bodies = {
        "/v1/completions": {"prompt": "One", **extra},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "One"}], **extra, "logprobs": True},
    }
    for path, body in bodies.items():
        async with http.post(path, json=body) as answer:
            lines = (await answer.text()).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert len(events) > 2
        assert [fault for event in events for fault in faults_of("POST", path, EVENTS, event)] == []
