"""Newcomers are taken a few at a time; where descriptors are short they wait, and that is said once a second."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lora_serve.server.sockets.listener import MAX_BURST, Listener, on_loop_error

NUM_CLIENTS = 3 * MAX_BURST


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as made:
        made.bind(("127.0.0.1", 0))
        yield made


@pytest.fixture
def clients(listener: Listener) -> Iterator[list[socket.socket]]:
    """They have connected; nobody has accepted them yet."""
    listener.listen(NUM_CLIENTS)
    made = [socket.create_connection(listener.getsockname()) for _ in range(NUM_CLIENTS)]
    yield made
    for client in made:
        client.close()


class Newcomers(asyncio.Protocol):
    """Remembers who came in which turn of the event loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.num_in_turn: dict[int, int] = {}
        self.transports: list[Any] = []

    def __call__(self) -> Newcomers:
        self.num_in_turn[self.turn] = self.num_in_turn.get(self.turn, 0) + 1
        return self

    def connection_made(self, transport: Any) -> None:
        self.transports.append(transport)


async def test_burst_is_taken_in_parts(listener: Listener, clients: list[socket.socket]) -> None:
    newcomers = Newcomers()
    server = await asyncio.get_running_loop().create_server(newcomers, sock=listener, backlog=1024)
    while len(newcomers.transports) < len(clients):
        newcomers.turn += 1
        await asyncio.sleep(0)
    assert max(newcomers.num_in_turn.values()) <= MAX_BURST
    for transport in newcomers.transports:
        transport.abort()
    server.close()


async def test_without_descriptors_newcomers_wait_and_the_log_has_a_line(
    listener: Listener, clients: list[socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    loop, newcomers = asyncio.get_running_loop(), Newcomers()
    loop.set_exception_handler(on_loop_error)
    caplog.set_level(logging.INFO)
    with no_descriptors_left():
        server = await loop.create_server(newcomers, sock=listener, backlog=1024)
        while not caplog.records:
            await asyncio.sleep(0)
        for _ in range(500):
            await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.getMessage().startswith("newcomers have to wait: Too many open files")
    assert record.exc_info is None
    async with asyncio.timeout(30):
        while len(newcomers.transports) < len(clients):
            await asyncio.sleep(0.01)
    for transport in newcomers.transports:
        transport.abort()
    server.close()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """The holes among the descriptors are filled, and the limit is what is open then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = [os.dup(0)]
    while fillers[-1] < highest:
        fillers.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(ConnectionResetError(), False), (TimeoutError(), False), (ValueError("a bug"), True), (OSError(24, "x"), True)],
)
async def test_only_our_own_errors_of_the_loop_have_a_traceback(
    error: Exception, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    on_loop_error(asyncio.get_running_loop(), {"message": "Task exception was never retrieved", "exception": error})
    (record,) = caplog.records
    assert bool(record.exc_info) == has_traceback
