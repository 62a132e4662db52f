"""Many connections, slow ones, and readers that stop: each has a limit, and whoever keeps within it notices nothing."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lora_serve.core.config import ServerConfig
from lora_serve.core.setting_groups.http import ConnectionLimits
from lora_serve.server.app import build_app
from lora_serve.server.sockets.connections import (
    CONNECTIONS,
    RESERVED_DESCRIPTORS,
    Connections,
    GuardedSite,
    descriptors_for,
)
from tests.mock_engine import MockReply

KEY = "admin-key-of-the-tests"
LIMITS = ConnectionLimits(
    max_connections=16, max_header_size=2048, keep_alive_timeout=600, body_timeout=600, write_timeout=600
)


class Door:
    """A server on a guarded socket."""

    def __init__(self, port: int, connections: Connections) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.connections = connections

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
def limits() -> ConnectionLimits:
    """Those that a test waits for are its own."""
    return LIMITS


@pytest.fixture
def server_config(server_config: ServerConfig, limits: ConnectionLimits) -> ServerConfig:
    return replace(server_config, **asdict(limits))


IMPATIENT_FOR_HEADS = pytest.mark.parametrize("limits", [replace(LIMITS, keep_alive_timeout=0.5)])
IMPATIENT_FOR_BODIES = pytest.mark.parametrize("limits", [replace(LIMITS, body_timeout=0.5)])
IMPATIENT_FOR_READERS = pytest.mark.parametrize("limits", [replace(LIMITS, write_timeout=0.5)])


@pytest.fixture
async def door(services: Any) -> AsyncIterator[Door]:
    app = build_app(services)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await GuardedSite(runner, listener, app[CONNECTIONS], backlog=128).start()
    yield Door(listener.getsockname()[1], app[CONNECTIONS])
    await runner.cleanup()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.01)


async def health(door: Door) -> int:
    async with aiohttp.ClientSession(door.url) as session, session.get("/health") as answer:
        return answer.status


async def test_idle_connections_make_room_for_those_who_ask(door: Door) -> None:
    idle = [await door.open() for _ in range(16)]
    await until(lambda: len(door.connections) == 16)
    assert await health(door) == 200
    assert door.connections.num_dropped == 1
    assert await idle[0][0].read() == b""  # the oldest
    for _, writer in idle:
        writer.close()
    await until(lambda: len(door.connections) == 0)


async def test_newcomer_is_refused_in_words_while_everybody_is_served(door: Door, services: Any) -> None:
    services.client.script = lambda request: MockReply(gate=gate)
    gate = asyncio.Event()
    body = {"prompt": "x", "max_tokens": 1}
    async with aiohttp.ClientSession(door.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        asked = [asyncio.create_task(_status(session.post("/v1/completions", json=body))) for _ in range(16)]
        await until(lambda: len(services.client.requests) == 16)
        async with aiohttp.ClientSession(door.url) as other, other.get("/health") as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert (await refused.json())["error"]["code"] == "overloaded"
        gate.set()
        assert await asyncio.gather(*asked) == [200] * 16
    assert door.connections.num_dropped == 0


async def _status(asking: Any) -> int:
    async with asking as answer:
        await answer.read()
        return int(answer.status)


@IMPATIENT_FOR_HEADS
@pytest.mark.parametrize("begun", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_connection_without_a_whole_head_is_closed(door: Door, begun: bytes) -> None:
    reader, writer = await door.open()
    writer.write(begun)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


@IMPATIENT_FOR_HEADS
async def test_head_in_drops_does_not_last_longer(door: Door) -> None:
    """Slowloris: each drop comes in time, the head never ends."""
    reader, writer = await door.open()
    writer.write(b"GET /health HTTP/1.1\r\n")
    async with asyncio.timeout(60):
        while not reader.at_eof():
            writer.write(b"X: y\r\n")
            done, _ = await asyncio.wait({asyncio.ensure_future(reader.read(1))}, timeout=0.05)
            if done:
                break
    writer.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GARBAGE\r\n\r\n", "not HTTP/1.1"),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", "--max-header-size"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 3000 + b"\r\n\r\n", "--max-header-size"),
    ],
)
async def test_what_is_no_http_is_refused_in_our_words_and_without_noise(
    door: Door, data: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await door.open()
    writer.write(data)
    async with asyncio.timeout(60):
        content = await reader.read()
    writer.close()
    head, _, body = content.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"Server: lora-serve" in head
    assert words in json.loads(body)["error"]["message"]
    assert [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info] == []


@IMPATIENT_FOR_BODIES
@pytest.mark.parametrize("path", ["/v1/completions", "/admin/adapters/acme/slow"])
async def test_body_that_does_not_come_is_408(door: Door, services: Any, path: str) -> None:
    reader, writer = await door.open()
    method = "PUT" if "admin" in path else "POST"
    kind = "application/x-tar" if "admin" in path else "application/json"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nAuthorization: Bearer {KEY}\r\n"
    writer.write(head.encode() + b"Content-Length: 900\r\n\r\n{")
    async with asyncio.timeout(60):
        line = await reader.readline()
        body = await reader.read()
    assert line.split()[1] == b"408"
    assert b"--body-timeout" in body
    writer.close()
    await until(lambda: not list((services.adapter_config.store / "tmp").iterdir()))


@IMPATIENT_FOR_BODIES
async def test_upload_that_comes_in_drops_is_408(door: Door, services: Any) -> None:
    reader, writer = await door.open()
    head = f"PUT /admin/adapters/acme/slow HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    writer.write(head.encode() + b"Content-Type: application/x-tar\r\nContent-Length: 90000\r\n\r\n")

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        dripping = group.create_task(drip())
        async with asyncio.timeout(60):
            line = await reader.readline()
        dripping.cancel()
    writer.close()
    assert line.split()[1] == b"408"
    await until(lambda: not list((services.adapter_config.store / "tmp").iterdir()))


@IMPATIENT_FOR_READERS
async def test_answer_that_nobody_reads_is_broken_off_and_its_row_freed(door: Door, services: Any) -> None:
    services.client.script = lambda request: MockReply(token_ids=[5] * 100_000)
    with socket.socket() as quiet:
        quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        quiet.connect(("127.0.0.1", door.port))
        body = json.dumps({"prompt": ["x"] * 16, "n": 16, "max_tokens": 100, "stream": True, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        async with AsyncExitStack() as stack:
            stack.callback(quiet.close)
            quiet.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            await until(lambda: len(services.client.requests) == 256)
            assert await health(door) == 200  # others are served meanwhile
            await until(lambda: door.connections.num_broken_off == 1)
            await until(lambda: services.lifecycle.num_inside == 0)
    await until(lambda: len(door.connections) == 0)


@pytest.mark.parametrize("limits", [replace(LIMITS, write_timeout=3)])
async def test_reader_that_is_only_slow_gets_its_whole_answer(door: Door, services: Any) -> None:
    """It takes a little in each of the intervals after which a reader that takes nothing is given up."""
    started = time.monotonic()
    services.client.script = lambda request: MockReply(token_ids=[5] * 120)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=2**10)
    body = json.dumps({"prompt": "x", "n": 8, "max_tokens": 100, "stream": True, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    content = b""
    async with asyncio.timeout(60):
        while chunk := await reader.read(2**14):
            content += chunk
            await asyncio.sleep(0.1)
    assert b"data: [DONE]" in content
    assert time.monotonic() - started > 3, "it was not slow"
    assert door.connections.num_broken_off == 0
    writer.close()


def test_connections_are_never_more_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.update(now=new))
    assert descriptors_for(500) == 500
    assert descriptors_for(4096) == 1024 - RESERVED_DESCRIPTORS
    limits["now"] = (1024, 10_000)
    assert descriptors_for(4096) == 4096
    assert limits["now"] == (4096 + RESERVED_DESCRIPTORS, 10_000)
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert descriptors_for(4096) == 4096
