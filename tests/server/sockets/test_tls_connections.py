"""Limits of connections where they are encrypted: handshakes that come to nothing, bytes that TLS has already taken."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from lora_serve.core.setting_groups.http import ConnectionLimits
from lora_serve.server.sockets import connections as module
from lora_serve.server.sockets.connections import Connections, GuardedSite, below_tls
from lora_serve.server.sockets.http_runner import HttpRunner
from tests.certificates import Certificate, make_certificate
from tests.server.sockets.test_connections import until

LIMITS = ConnectionLimits(max_connections=4, keep_alive_timeout=600, body_timeout=600, write_timeout=600)
BIG = 2_000_000  # bytes: more than the sockets' buffers, which are small here, and than aiohttp leaves to asyncio's
SMALL = 80_000  # more than the sockets' buffers alone


class Door:
    """A server that answers with few bytes, or with many."""

    def __init__(self, connections: Connections, port: int, context: ssl.SSLContext | None) -> None:
        self.connections = connections
        self.port = port
        self.context = context  # of its clients

    async def open_silent(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client that sends nothing, not even the beginning of a handshake."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client that takes little at once."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        name = "localhost" if self.context else None
        return await asyncio.open_connection(sock=client, ssl=self.context, server_hostname=name, limit=2**12)

    async def ask_for(self, num_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client whose answer begins to come."""
        reader, writer = await self.open()
        writer.write(b"GET /bytes/%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % num_bytes)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        return reader, writer

    async def ask(self) -> bytes:
        """The answer to somebody who comes new."""
        reader, writer = await self.open()
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        content = await reader.read()
        writer.close()
        return content


@asynccontextmanager
async def door_of(limits: ConnectionLimits, certificate: Certificate | None) -> AsyncIterator[Door]:
    connections = Connections(limits)
    app = web.Application(middlewares=[connections.middleware])

    async def small(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(int(request.match_info["num"])))

    app.add_routes([web.get("/", small), web.get("/bytes/{num}", large)])
    app.cleanup_ctx.append(connections.watching)
    runner = HttpRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)  # also of those that it accepts
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if certificate else None
    if context and certificate:
        context.load_cert_chain(certificate.certificate, certificate.key)
    await GuardedSite(runner, listener, connections, ssl_context=context).start()
    port = listener.getsockname()[1]
    yield Door(connections, port, certificate.client_context() if certificate else None)
    await runner.cleanup()


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path / "tls")


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest, certificate: Certificate) -> Certificate | None:
    return certificate if request.param == "tls" else None


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_silent_handshakes_count_as_connections_and_the_oldest_makes_room(certificate: Certificate) -> None:
    async with door_of(LIMITS, certificate) as door, AsyncExitStack() as stack:
        readers = []
        for num in range(1, 5):
            reader, writer = await door.open_silent()
            stack.callback(writer.close)
            readers.append(reader)
            await until(lambda num=num: len(door.connections) == num)  # type: ignore[misc]
        assert (await door.ask()).startswith(b"HTTP/1.1 200")
        assert (door.connections.num_dropped, door.connections.num_refused) == (1, 0)
        async with asyncio.timeout(30):
            assert await readers[0].read() == b"", "its socket is closed, and not only forgotten"
        await until(lambda: len(door.connections) == 3)
        await stack.aclose()
        await until(lambda: len(door.connections) == 0)


async def test_newcomers_that_are_refused_hold_few_descriptors(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REFUSALS", 3)
    async with door_of(LIMITS, certificate) as door, AsyncExitStack() as stack:
        served = [await door.ask_for(BIG) for _ in range(4)]
        for _, writer in served:
            stack.callback(writer.transport.abort)
        before = num_descriptors()
        for num in range(1, 31):
            stack.callback((await door.open_silent())[1].close)
            await until(lambda num=num: door.connections.num_refused == num)  # type: ignore[misc]
        await until(lambda: num_descriptors() - before == 30 + 3)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await door.ask()
        await stack.aclose()
        await until(lambda: num_descriptors() == before - 8)
        assert (await door.ask()).startswith(b"HTTP/1.1 200")


async def test_refusals_that_are_over_leave_room_for_others_in_words(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REFUSALS", 1)
    async with door_of(replace(LIMITS, max_connections=1), certificate) as door:
        kept = await door.ask_for(BIG)
        _, refused = await door.open_silent()
        await until(lambda: len(door.connections._refused) == 1)
        refused.close()
        await until(lambda: not door.connections._refused)
        for _ in range(2):
            assert (await door.ask()).startswith(b"HTTP/1.1 503")
            await until(lambda: not door.connections._refused)
        kept[1].transport.abort()


async def test_silent_handshake_ends_soon(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.HANDSHAKE_SECONDS < 15
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.2)
    async with door_of(LIMITS, certificate) as door:
        reader, writer = await door.open_silent()
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: len(door.connections) == 0)


async def test_idle_connection_makes_room_for_a_newcomer(either: Certificate | None) -> None:
    async with door_of(LIMITS, either) as door:
        idle = [await door.open() for _ in range(4)]
        assert (await door.ask()).startswith(b"HTTP/1.1 200")
        assert (door.connections.num_dropped, door.connections.num_refused) == (1, 0)
        for _, writer in idle:
            writer.close()


async def test_answer_that_is_on_its_way_is_not_cut_by_newcomers(either: Certificate | None) -> None:
    async with door_of(replace(LIMITS, max_connections=1), either) as door:
        reader, writer = await door.ask_for(BIG)
        await until(lambda: not door.connections._serving)  # the handler is done, most bytes are still here
        assert (await door.ask()).startswith(b"HTTP/1.1 503")
        assert len(await reader.readexactly(BIG)) == BIG
        writer.close()


@pytest.mark.many(4)
@pytest.mark.parametrize("num_bytes", [BIG, SMALL])
@pytest.mark.parametrize("keep_alive", [600, 0.1])  # then aiohttp closes, and forgets that bytes are left
async def test_answer_that_nobody_takes_is_broken_off(
    either: Certificate | None, num_bytes: int, keep_alive: float
) -> None:
    async with door_of(replace(LIMITS, write_timeout=0.5, keep_alive_timeout=keep_alive), either) as door:
        _, writer = await door.ask_for(num_bytes)
        below_tls(cast(asyncio.Transport, writer.transport)).pause_reading()
        await until(lambda: door.connections.num_broken_off == 1)
        await until(lambda: len(door.connections) == 0)
        writer.transport.abort()
