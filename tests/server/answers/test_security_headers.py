"""Headers of every answer: whatever the route, the status, the method, and even where there was no HTTP."""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import pytest

from lora_serve.core.errors import NumericalError
from lora_serve.server.routes import TABLE
from tests.mock_engine import MockReply
from tests.server.sockets.test_framing import raw

NEEDED = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "lora-serve",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def check(headers: Any) -> None:
    assert {name: headers.get(name) for name in NEEDED} == NEEDED
    assert [name for name in headers if name.lower().startswith("access-control-")] == []
    assert "X-Powered-By" not in headers


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE", "PATCH"])
async def test_every_answer_has_them(http: aiohttp.ClientSession, method: str) -> None:
    for path in (*dict.fromkeys(route.path for route in TABLE.routes if not route.is_page), "/nowhere"):
        async with http.request(method, path) as answer:
            check(answer.headers)
            assert answer.status < 500, path


async def test_answers_streams_and_errors_have_them(http: aiohttp.ClientSession, house: Any) -> None:
    for body in ({"prompt": "x", "max_tokens": 2}, {"prompt": "x", "max_tokens": 2, "stream": True}, {"prompt": 7}):
        async with http.post("/v1/completions", json=body) as answer:
            check(answer.headers)
    house.engine.script = lambda request: MockReply(error=NumericalError("x"))
    async with http.post("/v1/completions", json={"prompt": "x"}) as answer:
        assert answer.status == 500
        check(answer.headers)


async def test_other_sites_are_not_allowed_anything(http: aiohttp.ClientSession) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for path in ("/v1/completions", "/admin/adapters", "/metrics"):
        async with http.options(path, headers=asked) as answer:
            assert answer.status == 403
            check(answer.headers)
        async with http.get(path, headers=asked) as answer:
            check(answer.headers)


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization Bearer hush-hush\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\nhush-hush",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nhush-hush\r\n",
    ],
)
async def test_broken_http_tells_no_versions_and_its_bytes_are_not_logged(
    house: Any, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        status, head, body = await raw(house, data)
    assert status == 400
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
    check(lines)
    assert b"aiohttp" not in head + body
    assert b"hush-hush" not in body
    assert "hush-hush" not in caplog.text
    assert "Traceback" not in caplog.text
