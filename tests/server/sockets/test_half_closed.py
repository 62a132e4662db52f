"""Clients that end their side of the connection and wait: they are answered. Those that are gone are not waited for."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from lora_serve.server.sockets import http_runner
from tests.mock_engine import MockReply

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
STREAM = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()


def completion(body: bytes = BODY, version: str = "1.1") -> bytes:
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


Sent = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def sent(port: int | str, data: bytes, *, half_close: bool = True) -> AsyncIterator[Sent]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(data)
    if half_close:
        writer.write_eof()
    try:
        async with asyncio.timeout(30):
            yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def port_of(house: Any) -> int:
    return int(house.url.rpartition(":")[2])


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.\d (\d{3}) ", answer)]


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_runner, "_BETWEEN_LOOKS", 0.1)


@pytest.fixture
def gate(house: Any) -> asyncio.Event:
    """Every answer waits for it."""
    gate = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    return gate


@pytest.mark.parametrize("data", [HEALTH, HEALTH.replace(b"1.1", b"1.0"), completion(), completion(STREAM)])
async def test_client_that_sends_no_more_gets_its_answer_and_an_end(house: Any, data: bytes) -> None:
    async with sent(port_of(house), data) as (reader, _):
        answer = await reader.read()
    assert statuses(answer) == [200]
    assert b"connection: close" in answer.lower() or data.endswith(STREAM) or b"HTTP/1.0" in data
    assert house.engine.aborted == []


async def test_slow_answer_comes_too_and_the_client_is_asked_meanwhile(house: Any, gate: asyncio.Event) -> None:
    async with sent(port_of(house), completion()) as (reader, _):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        gate.set()
        answer = await reader.read()
    assert set(statuses(answer)) <= {100, 200}
    assert answer.count(b"choices") == 1


async def test_client_of_the_standard_library_skips_what_it_is_asked(house: Any, gate: asyncio.Event) -> None:
    def ask() -> tuple[int, bytes]:
        with socket.create_connection(("127.0.0.1", port_of(house)), timeout=30) as connection:
            connection.sendall(completion())
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1, socket.MSG_PEEK)  # it was asked
            loop.call_soon_threadsafe(gate.set)
            with http.client.HTTPResponse(connection, method="POST") as answer:
                answer.begin()
                return answer.status, answer.read()

    loop = asyncio.get_running_loop()
    status, body = await asyncio.to_thread(ask)
    assert (status, len(json.loads(body)["choices"])) == (200, 1)


async def test_client_that_is_gone_is_not_waited_for(house: Any, gate: asyncio.Event) -> None:
    for body in (BODY, STREAM):
        house.engine.requests.clear()
        house.engine.aborted.clear()
        async with sent(port_of(house), completion(body), half_close=False):
            await until(lambda: len(house.engine.requests) == 1)
        await until(lambda: len(house.engine.aborted) == 1)


async def test_client_that_goes_after_it_has_waited_is_not_waited_for(house: Any, gate: asyncio.Event) -> None:
    async with sent(port_of(house), completion()) as (reader, _):
        await reader.readuntil(b"\r\n\r\n")
        assert house.engine.aborted == []
    await until(lambda: len(house.engine.aborted) == 1)


async def test_client_that_goes_in_the_middle_of_a_stream_is_not_waited_for(house: Any) -> None:
    house.engine.script = lambda request: MockReply(delay=0.05)
    body = json.dumps({"prompt": "x", "max_tokens": 100, "stream": True}).encode()
    async with sent(port_of(house), completion(body)) as (reader, _):
        await reader.readuntil(b"data: ")
        await reader.readuntil(b"data: ")
    await until(lambda: len(house.engine.aborted) == 1)


async def test_leaving_is_noticed_through_a_proxy_that_hands_on_single_ends(house: Any, gate: asyncio.Event) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port_of(house))
        await asyncio.gather(pump(reader, server_writer), pump(server_reader, writer))
        server_writer.close()
        writer.close()

    proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with proxy:
        async with sent(proxy.sockets[0].getsockname()[1], completion(), half_close=False):
            await until(lambda: len(house.engine.requests) == 1)
        await until(lambda: len(house.engine.aborted) == 1)


async def test_requests_in_a_row_are_all_answered(house: Any) -> None:
    async with sent(port_of(house), HEALTH + completion() + HEALTH) as (reader, _):
        answer = await reader.read()
    assert statuses(answer) == [200, 200, 200]


async def test_half_a_request_is_given_up_at_once(house: Any) -> None:
    whole = completion()
    for part in (b"", HEALTH[:10], whole[:-5], HEALTH + whole[:-5], HEALTH + HEALTH[:10]):
        async with sent(port_of(house), part) as (reader, _):
            answer = await reader.read()
        assert statuses(answer) == ([200] if part.startswith(HEALTH) else [])
    assert house.engine.requests == []


async def test_client_that_cannot_be_asked_is_waited_for_a_moment(
    house: Any, gate: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_runner, "PATIENCE", 0.2)
    async with sent(port_of(house), completion(version="1.0")) as (reader, _):
        assert await reader.read() == b""
    await until(lambda: len(house.engine.aborted) == 1)
