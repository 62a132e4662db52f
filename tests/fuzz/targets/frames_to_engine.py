"""A frame for the engine: in its process, or in a replica of a fleet. What is taken crosses back as it was."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from lora_serve.client.wire import body_of, to_engine
from tests.client.test_wire import FROM_ENGINE, TO_ENGINE
from tests.fuzz.mutating import either, within

ERRORS = (msgspec.DecodeError,)


def fuzz(data: bytes) -> None:
    again = body_of(to_engine(data))
    assert body_of(to_engine(again)) == again


def seeds() -> Iterator[bytes]:
    yield body_of(TO_ENGINE)
    yield from (body_of([message]) for message in (*TO_ENGINE, FROM_ENGINE[0]))

    yield b"\x91\x94\xa5Reply\x01\xc0" + b"\x91" * 5000
    yield b"\x91\x91\xa1\xff"
    yield b"\xdd\xff\xff\xff\xff"


tree = within(msgspec.msgpack.decode, msgspec.msgpack.encode, tuple(type(message).__name__ for message in TO_ENGINE))
mutate = either(tree, tree, lambda data, most, _, mutate_bytes: mutate_bytes(data, most))
