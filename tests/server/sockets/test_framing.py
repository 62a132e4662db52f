"""Raw sockets: what no HTTP library would send."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lora_serve.server.app import build_app
from lora_serve.server.services import Services
from lora_serve.server.sockets.http_runner import HttpRunner

KEY = "admin-key-of-the-tests"


async def raw(house: Any, data: bytes, *more: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of the first answer to `data`."""
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    for part in more:
        await asyncio.sleep(0.01)
        writer.write(part)
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), head, body


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [
        b"POST " + path + b" HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: " + str(len(body)).encode(),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


GOOD = b'{"prompt": "x", "max_tokens": 1}'


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header line\r\n\r\n",
        b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health  HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/0.9\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
async def test_broken_http_is_400_and_tells_no_secrets(house: Any, data: bytes) -> None:
    status, _, body = await raw(house, data)
    assert status == 400
    assert b"Traceback" not in body
    assert b'File "' not in body


@pytest.mark.parametrize("cut", [4, 5, 13, 14])
@pytest.mark.parametrize("line", [b"GET  /health HTTP/1.1", b"GET /health  HTTP/1.1"])
async def test_doubled_blanks_are_found_in_whatever_pieces_they_come(house: Any, line: bytes, cut: int) -> None:
    rest = b"\r\nHost: localhost\r\n\r\n"
    status, _, body = await raw(house, line[:cut], line[cut:] + rest)
    assert (status, json.loads(body)["error"]["code"]) == (400, "bad_http")
    status, head, _ = await raw(house, b"GET /health HTTP/1.1\r\nConnection: close\r\nX: a", line + rest)
    assert (status, b"HTTP/1.1 200" in head) == (200, True), "a header is no first line"


@pytest.mark.parametrize("cut", [0, 3, 5, 9])
async def test_doubled_blanks_of_a_pipelined_request_are_found(house: Any, cut: int) -> None:
    """Also if the request's first line comes in two pieces, the first with the request before it."""
    sound, odd = (b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in (b"/health", b" /health"))
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sound + odd[:cut])
    await asyncio.sleep(0.01 * bool(cut))
    writer.write(odd[cut:] + sound)
    async with asyncio.timeout(60):
        answers = await reader.read()  # to the end: what is behind it is not read
    writer.close()
    assert re.findall(rb"HTTP/1\.[01] (\d+)", answers) == [b"200", b"400"]


async def test_header_that_is_no_text_is_an_unknown_adapter(house: Any) -> None:
    status, _, body = await raw(house, post(GOOD, b"X-Adapter-Id: \xff\xfe"))
    assert status == 404
    assert json.loads(body)["error"]["code"] == "model_not_found"


async def test_authorization_that_is_no_text_is_401(house: Any) -> None:
    data = b"GET /admin/engine HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
    status, _, body = await raw(house, data)
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/%FF",
        "/v1/models/a%00b",
        "/v1/models/%zz",
        "/v1/models/..%2f..%2fetc",
        "/v1/models/%2e%2e",
        "/v1/models/a@@",
    ],
)
async def test_tricky_paths_are_unknown_models(house: Any, path: str) -> None:
    status, _, body = await raw(house, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert status in (400, 404)
    if status == 404:
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
@pytest.mark.parametrize("name", ["a%00b", "%FF", "a%0Ab", "..%2f..%2fx", "a%5c..%5cb"])
async def test_tricky_ids_reach_no_file(house: Any, method: str, name: str) -> None:
    head = f"{method} /admin/adapters/{name} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    status, _, _ = await raw(house, head.encode() + b"Content-Length: 0\r\n\r\n")
    assert status in (400, 404)
    assert sorted(path.name for path in house.store.iterdir() if path.is_dir()) in ([], ["tmp"], ["blobs", "tmp"])


async def test_body_that_looks_like_odd_http_is_a_body(house: Any) -> None:
    data = post(b"GET  /health  HTTP/1.1\r\n\r\n")
    status, _, body = await raw(house, data[:-26], data[-26:])
    assert (status, json.loads(body)["error"]["code"]) != (400, "bad_http")


async def test_prefix_of_paths_may_be_left_in_place(services: Services) -> None:
    """As under uvicorn's and vLLM's: behind a proxy that takes `/llm` away and behind one that does not."""
    runner = HttpRunner(build_app(services), shutdown_timeout=1.0, root_path="/llm")
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
        for path, expected in (
            ("/llm/v1/models", 200), ("/v1/models", 200), ("/llm/v1/models/a%2Fb", 404), ("/llm/health?x=%20", 200),
            ("/llm", 200), ("/llmv1/models", 404), ("/llm/llm/v1/models", 404),
        ):  # fmt: skip
            async with http.get(path) as answer:
                assert answer.status == expected, path
                body = await answer.text()
        assert "/llm" not in body
        async with http.post("/llm/v1/completions", json={"prompt": "x", "max_tokens": 2}) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == 2
    await runner.cleanup()


@pytest.mark.parametrize(
    ("sent", "is_echoed"),
    [
        ("order-8274 / retry 2", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("t\xe4g", False),
        ("a\tb", False),
    ],
)
async def test_clients_own_id_is_echoed_and_logged(
    house: Any, caplog: pytest.LogCaptureFixture, sent: str, is_echoed: bool
) -> None:
    with caplog.at_level(logging.INFO, "lora_serve.access"):
        _, head, body = await raw(house, post(GOOD, b"X-Request-Id: " + sent.encode()))
    (line,) = [record for record in caplog.records if record.name == "lora_serve.access"]
    given = head.partition(b"X-Request-Id: ")[2].partition(b"\r\n")[0].decode()
    assert (given == sent) is is_echoed
    assert getattr(line, "client_request_id", None) == (sent if is_echoed else None)
    assert json.loads(body)["id"] == f"cmpl-{line.request_id}"
    assert house.engine.requests[0].answer_id == line.request_id


async def test_body_in_drops_is_read(house: Any) -> None:
    data = post(GOOD)
    status, _, _ = await raw(house, data[:20], data[20:150], data[150:])
    assert status == 200


async def test_client_may_ask_before_it_sends_its_body(house: Any) -> None:
    """Expect: 100-continue, as curl does for larger bodies."""
    data = post(GOOD, b"Expect: 100-continue")
    status, head, _ = await raw(house, data[: -len(GOOD)], GOOD)
    assert (status, head.startswith(b"HTTP/1.1 100")) == (100, True)
    status, _, _ = await raw(house, post(GOOD, b"Expect: miracles"))
    assert status == 417


async def test_two_requests_on_one_connection_do_not_mix(house: Any) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(post(GOOD) + post(b"{") + post(GOOD, b"Connection: close"))
    async with asyncio.timeout(60):
        data = await reader.read()
    writer.close()
    await writer.wait_closed()
    statuses = [int(part.split()[0]) for part in data.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 400, 200]
