"""Every error has a status, a form and a request id; and shows nothing that is not the caller's."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any
from unittest import mock
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from lora_serve.core import errors
from lora_serve.server.answers import wire_error
from lora_serve.server.middleware import answer
from lora_serve.server.route import ROUTES
from lora_serve.server.routes import TABLE
from lora_serve.server.services import SERVICES
from tests.mock_engine import MockReply
from tests.server.conftest import leave_in_the_middle

REQUEST_ID = "0123456789abcdef"


def every_error() -> list[type[errors.LoraServeError]]:
    found, waiting = [], [errors.LoraServeError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return found


def made(kind: type[errors.LoraServeError]) -> errors.LoraServeError:
    return kind(["the reason"]) if kind is errors.InvalidAdapterError else kind("the message")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", every_error())
def test_whole_error_tree_has_a_status(kind: type[errors.LoraServeError]) -> None:
    shown = wire_error(made(kind), REQUEST_ID)
    if issubclass(kind, errors.RequestError) and kind is not errors.RequestError:
        assert 400 <= shown.status < 500
    if issubclass(kind, errors.CapacityError):
        limited = (errors.TenantQueueFullError, errors.RateLimitedError, errors.DeviceQuotaError)
        status = 429 if issubclass(kind, limited) else 503
        assert (shown.status, shown.headers) == (status, {"Retry-After": "1"})
    if issubclass(kind, errors.InternalError):
        assert shown.status == 500
        assert "the message" not in shown.message
    reasons = {"reasons"} if kind is errors.InvalidAdapterError else set()
    assert set(msgspec.to_builtins(shown.body().error)) == {"message", "type", "param", "code"} | reasons


def test_unexpected_exception_shows_its_request_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    shown = wire_error(ZeroDivisionError("/home/secret/path"), REQUEST_ID)
    assert (shown.status, shown.code) == (500, "internal_error")
    assert REQUEST_ID in shown.message
    assert "secret" not in shown.message
    assert "secret" in caplog.text
    assert REQUEST_ID in caplog.text


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (1.2, "2"), (600.0, "120")])
def test_retry_after_is_whole_seconds_within_bounds(seconds: float, header: str) -> None:
    shown = wire_error(errors.QueueFullError("full", retry_after=seconds), REQUEST_ID)
    assert shown.headers == {"Retry-After": header}


def test_aiohttps_own_refusals_have_the_same_form() -> None:
    assert wire_error(web.HTTPNotFound(), REQUEST_ID).status == 404
    shown = wire_error(web.HTTPMethodNotAllowed("PATCH", ["GET", "POST"]), REQUEST_ID)
    assert (shown.status, shown.headers) == (405, {"Allow": "GET, POST"})
    assert wire_error(web.HTTPRequestEntityTooLarge(1, 2), REQUEST_ID).status == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models//", 404),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
    ],
)
async def test_wrong_urls_and_methods_are_told_in_the_same_form(
    http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, path) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["type"] == "invalid_request_error"
        assert len(answer.headers["X-Request-Id"]) == 32
        if status == 405:
            assert answer.headers["Allow"]


async def test_request_ids_are_never_the_same(http: aiohttp.ClientSession) -> None:
    ids = set()
    for path in ("/health", "/nowhere", "/v1/models", "/metrics", "/v1/completions"):
        async with http.get(path) as answer:
            ids.add(answer.headers["X-Request-Id"])
    assert len(ids) == 5


async def test_bug_in_a_handler_is_a_plain_500_and_the_server_goes_on(
    http: aiohttp.ClientSession, house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Any) -> MockReply:
        raise ZeroDivisionError("/home/secret/path")

    house.engine.script = broken
    async with http.post("/v1/completions", json={"prompt": "x"}) as answer:
        body = await answer.json()
        assert answer.status == 500
        assert answer.headers["X-Request-Id"] in body["error"]["message"]
        assert "secret" not in str(body)
    assert "secret" in caplog.text
    house.engine.script = lambda request: MockReply()
    house.engine._rows.clear()
    async with http.post("/v1/completions", json={"prompt": "x"}) as answer:
        assert answer.status == 200


async def test_access_log_has_a_line_per_request_and_no_content(
    http: aiohttp.ClientSession, house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await house.register("acme/a")
    body = {"model": "acme/a", "prompt": "my secret prompt", "max_tokens": 3}
    with caplog.at_level(logging.INFO, "lora_serve.access"):
        async with http.post("/v1/completions?token=hush", json=body, headers={"Authorization": "Bearer hush"}):
            pass
        async with http.get("/nowhere%0Aforged line"):
            pass
    lines = [record for record in caplog.records if record.name == "lora_serve.access"]
    assert [record.getMessage().count("\n") for record in lines] == [0, 0]
    first: Any = lines[0]
    assert (first.tenant, first.adapter, first.output_tokens) == ("default", "acme/a@1", 3)
    assert (first.method, first.path, first.status) == ("POST", "/v1/completions", 200)
    assert first.getMessage() == f"POST /v1/completions 200 {first.duration_ms:.1f} ms"
    assert len(first.request_id) == 32
    assert first.prompt_tokens > 0
    assert "secret" not in caplog.text
    assert "hush" not in caplog.text


async def test_client_that_leaves_is_logged_as_499(
    http: aiohttp.ClientSession, house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    house.engine.script = lambda request: MockReply(gate=asyncio.Event())
    with caplog.at_level(logging.INFO, "lora_serve.access"):
        await leave_in_the_middle(http, house)
        async with asyncio.timeout(60):
            while "499" not in caplog.text:
                await asyncio.sleep(0.005)


async def test_write_to_a_client_that_left_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def write(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    app = web.Application()
    app[ROUTES], app[SERVICES] = TABLE, Mock()
    gone, alive = Mock(), Mock()
    gone.is_closing.return_value, alive.is_closing.return_value = True, False
    with caplog.at_level(logging.INFO, "lora_serve.access"):
        assert (await answer(make_mocked_request("GET", "/", transport=gone, app=app), write)).status == 499
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (await answer(make_mocked_request("GET", "/", transport=alive, app=app), write)).status == 500


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
async def test_lack_of_memory_is_overload(
    http: aiohttp.ClientSession, house: Any, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with mock.patch("lora_serve.server.openai.completions.resolve", side_effect=error):
        async with http.post("/v1/completions", json={"prompt": "x"}) as answer:
            body = (await answer.json())["error"]
    assert (answer.status, body["code"], answer.headers["Retry-After"]) == (503, "overloaded", "1")
    assert "ulimit -v" in body["message"]
    assert not any(record.exc_info for record in caplog.records)
