"""The bytes of a connection to a fleet's entrance, as they come in: the ticket, a name, frames for a replica.

They end the connection, or reach the replica the same however they are cut.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

import msgspec

from lora_serve.client.wire import body_of, frame_of, head_of
from lora_serve.engine_host.fleet.gateways import Entrance, Gateways, _Arrival
from tests.client.test_wire import TO_ENGINE
from tests.fuzz.mutating import Bytes

ERRORS = (msgspec.DecodeError, UnicodeDecodeError, ValueError)  # each ends the connection, by asyncio
TICKET = bytes(range(32))


class Loop:
    """An event loop on which nothing happens later."""

    def call_later(self, *given: object) -> None: ...
    def call_soon_threadsafe(self, *given: object) -> None: ...


LOOP = Loop()


class Host:
    """A replica's gateways before an engine that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.gateways = Gateways(self.told.append, self.told.append)


class Socket(asyncio.Transport):
    """Notes only that it was closed."""

    is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def _heard(pieces: list[bytes]) -> tuple[list[str], bool, Exception | None]:
    """What the engine was told, whether the connection was ended, and by which error. The ticket is put right."""
    host = Host()
    entrance = Entrance("127.0.0.1", host.gateways, list)
    entrance._ticket = TICKET
    arrival, end = _Arrival(TICKET, entrance._admit, entrance._leave), Socket()
    arrival.connection_made(end)
    error = None
    for piece in pieces:
        try:
            arrival.data_received(piece)
        except ERRORS as found:  # then asyncio ends the connection
            error = found
        if error is not None or end.is_aborted:
            break
    told = [repr(message) for message in host.told]
    arrival.connection_lost(None)
    assert host.gateways.num_attached == 0
    assert host.gateways.num_requests == 0
    assert entrance._is_empty.is_set()
    return told, end.is_aborted or error is not None, error


def fuzz(data: bytes) -> None:
    """The first byte says how the rest is cut."""
    step, stream = 1 + (data[0] if data else 0), data[1:]
    asyncio._set_running_loop(LOOP)  # type: ignore[arg-type]
    try:
        whole = _heard([stream])
        cut = _heard([stream[at : at + step] for at in range(0, len(stream), step)])
    finally:
        asyncio._set_running_loop(None)
    assert (whole[0], whole[1]) == (cut[0], cut[1])
    if whole[2] is not None:
        raise whole[2]


def seeds() -> Iterator[bytes]:
    start = TICKET + head_of(b"g") + b"g"
    yield b"\x07" + start + frame_of(TO_ENGINE[1:4]) + frame_of([])
    yield b"\x00" + start + frame_of(TO_ENGINE[4:])
    yield b"\xff" + start + b"".join(head_of(body) + body for body in (body_of([one]) for one in TO_ENGINE[:12]))
    yield b"\x03" + bytes(32) + head_of(b"g") + b"g"
    yield b"\x03" + TICKET + head_of(b"\xff") + b"\xff"
    yield b"\x03" + start + b"\xff\xff\xff\xff"
    yield b"\x1f" + TICKET[:-1]
    yield b"\x05GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def mutate(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    """One frame is changed, and its length with it; or any byte."""
    if seed % 4 == 0 or len(data) < 34:
        return mutate_bytes(data, max_bytes)
    frames, at = [], 33
    while at + 4 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        frames.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if not frames:
        return mutate_bytes(data, max_bytes)
    which = seed // 4 % len(frames)
    from tests.fuzz.targets.frames_to_engine import tree

    if seed % 3 == 0 and which:
        frames[which] = tree(frames[which], 4096, seed, mutate_bytes)
    elif seed % 3 == 1:
        frames.insert(which, frames[-1])
    else:
        frames[which] = mutate_bytes(frames[which], len(frames[which]) + 64)
    return (data[:33] + b"".join(head_of(frame) + frame for frame in frames))[:max_bytes]
