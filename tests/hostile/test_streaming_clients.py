"""Clients that leave at any moment, stop reading, or come by the thousand and say nothing."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from lora_serve.server.sockets.connections import CONNECTIONS
from tests.canary.house import KEY, House
from tests.canary.questions import TENANTS
from tests.hostile.sending import TIMEOUT, send

RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER: on, 0 seconds
NUM_IDLE = 1500


@pytest.fixture(scope="module")
def house_settings() -> dict[str, Any]:
    return {"write_timeout": 0.5, "max_connections": 3000}


def ask(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    head += f"\r\nAuthorization: Bearer {KEY}"
    return head.encode() + b"\r\n\r\n" + body


def connect(house: House) -> socket.socket:
    return socket.create_connection(("127.0.0.1", house.port), timeout=TIMEOUT)


def until(is_true: Callable[[], bool], patience: float = 60.0) -> None:
    wait, deadline = threading.Event(), time.monotonic() + patience
    while not is_true():
        assert time.monotonic() < deadline
        wait.wait(0.02)


MOMENTS: dict[str, Callable[[socket.socket], object]] = {
    "at_once": lambda c: None,
    "after_the_status": lambda c: c.recv(12),
    "after_the_head": lambda c: c.recv(400),
    "in_the_middle": lambda c: [c.recv(200) for _ in range(8)],
    "with_the_write_side_closed": lambda c: c.shutdown(socket.SHUT_WR),
    "with_the_read_side_closed": lambda c: c.shutdown(socket.SHUT_RD),
}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_client_that_leaves_frees_its_rows(house: House, moment: str, how: str) -> None:
    for fields in ({}, {"n": 4}, {"stream": False}, {"model": f"{random.Random(moment).choice(TENANTS)}/a"}):
        with connect(house) as client:
            client.sendall(ask(**fields))
            if fields.get("stream", True) or "side" in moment:
                MOMENTS[moment](client)
            if how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    until(lambda: house.services.lifecycle.num_inside <= 12)  # the canaries' own


def test_readers_that_stop_are_broken_off_and_others_are_served(house: House) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", house.port))
            client.sendall(ask(prompt=["x"] * 4, n=16, logprobs=20, max_tokens=80))
        assert send(house, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 200
        until(lambda: house.app[CONNECTIONS].num_broken_off >= 2)
    until(lambda: house.services.lifecycle.num_inside <= 12)


def test_thousands_of_idle_connections_keep_nobody_out(house: House) -> None:
    with ExitStack() as stack:
        for number in range(NUM_IDLE):
            client = stack.enter_context(connect(house))
            if number % 3:
                client.sendall(b"GET /health HTTP/1.1\r\nX: "[: number % 20])
        begun = time.monotonic()
        assert send(house, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 200
        assert time.monotonic() - begun < 30


def test_storm_of_disconnects_frees_everything(house: House) -> None:
    """Hundreds in a few seconds, each at another moment."""
    moments = random.Random(5)
    for _ in range(300):
        with connect(house) as client:
            request = ask(model=f"{moments.choice(TENANTS)}/{moments.choice('ab')}", n=moments.choice((1, 1, 3)))
            client.sendall(request[: moments.choice((len(request), len(request), 40, len(request) - 3))])
            if moments.random() < 0.3:
                client.settimeout(0.02)
                with suppress(TimeoutError):
                    client.recv(100)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    until(lambda: house.services.lifecycle.num_inside <= 12)
