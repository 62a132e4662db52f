"""A frame that the engine sends, from its process or a replica of a fleet. What is taken crosses back as it was."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from lora_serve.client.wire import body_of, from_engine
from lora_serve.core.messages import ErrorEvent, LoadRefused, LostEvent, Reply
from tests.client.test_wire import ERRORS as WORDS
from tests.client.test_wire import FROM_ENGINE, TO_ENGINE, stats_of_an_engine
from tests.fuzz.mutating import either, within

ERRORS = (msgspec.DecodeError,)


def fuzz(data: bytes) -> None:
    again = body_of(from_engine(data))
    assert body_of(from_engine(again)) == again


def seeds() -> Iterator[bytes]:
    yield from (body_of([message]) for message in (*FROM_ENGINE, TO_ENGINE[0], Reply(9, stats_of_an_engine())))
    for error in (*WORDS, OSError(2, "gone")):
        yield body_of([ErrorEvent("r", error), LostEvent("r", error), Reply(1, error=error), LoadRefused(error)])

    yield b"\x91\x94\xa5Reply\x01\xc0" + b"\x91" * 5000
    yield b"\x91\x91\xa1\xff"
    yield b"\xdd\xff\xff\xff\xff"


tree = within(msgspec.msgpack.decode, msgspec.msgpack.encode, ("OSError", *(type(error).__name__ for error in WORDS)))
mutate = either(tree, tree, lambda data, most, _, mutate_bytes: mutate_bytes(data, most))
