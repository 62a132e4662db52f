"""The answers of a neighbour to which requests overflow: a stream of tokens, a vector, a list of models.

Whatever it says, there come no tokens that were not asked for, and an end or an error.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, cast

from aiohttp import ClientResponse

from lora_serve.core.messages import FinishEvent, PooledEvent, TokenEvent
from lora_serve.core.request import InferenceRequest, SamplingParams
from lora_serve.server.overflow.reading import NeighbourError, tokens_of, vector_of
from tests.fuzz.mutating import Bytes, within

ERRORS = (NeighbourError,)
REQUEST = InferenceRequest("r", (1, 2), SamplingParams(max_tokens=5))
VOCABULARY, DIMENSION = 50, 3


class Content:
    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def iter_any(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


class Response:
    """See aiohttp's own."""

    def __init__(self, kind: str, parts: list[bytes]) -> None:
        self.content_type, self.content = kind, Content(parts)


def _run(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Nothing in it waits for anything."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast("list[Any]", end.value)
    raise AssertionError("it waits")


async def _all(events: Any) -> list[Any]:
    return [event async for event in events]


def fuzz(data: bytes) -> None:
    """The first byte: how it is cut, and whether it is a stream."""
    head, rest = (data or b"\0")[0], data[1:]
    step = 1 + head // 2
    parts = [rest[at : at + step] for at in range(0, len(rest), step)]
    read: Callable[[list[bytes]], list[Any]] = _vector if head % 2 else _stream
    found, whole = _outcome(read, parts), _outcome(read, [rest])
    assert repr(found) == repr(whole), (found, whole)
    if isinstance(found, NeighbourError):
        raise found


def _outcome(read: Callable[[list[bytes]], list[Any]], parts: list[bytes]) -> Any:
    try:
        return read(parts)
    except NeighbourError as error:
        return error


def _stream(parts: list[bytes]) -> list[Any]:
    response = cast("ClientResponse", Response("text/event-stream", parts))
    *tokens, end = _run(_all(tokens_of(response, REQUEST, VOCABULARY, frozenset({7}))))
    assert all(isinstance(token, TokenEvent) and 0 <= token.token_id < VOCABULARY for token in tokens)
    assert len(tokens) <= REQUEST.sampling.max_tokens
    assert isinstance(end, FinishEvent)
    return [*tokens, end]


def _vector(parts: list[bytes]) -> list[Any]:
    response = cast("ClientResponse", Response("application/json", parts))
    pooled, end = _run(_all(vector_of(response, REQUEST, DIMENSION)))
    assert isinstance(pooled, PooledEvent)
    assert len(pooled.values) == 4 * DIMENSION
    return [pooled, end]


def _event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"id": "c", "choices": [{"index": 0, "text": "x", **choice}]}).encode() + b"\n\n"


def seeds() -> Iterator[bytes]:
    done = b"data: [DONE]\n\n"
    yield b"\x10" + _event(token_ids=[1]) + _event(token_ids=[2, 7], finish_reason="stop") + done
    yield b"\xfe" + _event(token_ids=[1, 2, 3, 4, 5]) + _event(text="", token_ids=[], finish_reason="length") + done
    yield (
        b"\x40"
        + _event(token_ids=[1])
        + b': comment\r\n\r\nevent: x\r\ndata: {"choices": [], "usage": {}}\r\n\r\n'
        + done
    )
    yield b"\x08" + _event(token_ids=[51]) + done
    yield b"\x08" + _event(text="no ids") + done
    yield b"\x08" + b'data: {"error": {"message": "no"}}\n\n'
    yield b"\x08" + _event(token_ids=[1], finish_reason="abort")
    vector = base64.b64encode(struct.pack("<3f", 1, 2, 3)).decode()
    yield b"\x11" + json.dumps({"data": [{"embedding": vector, "index": 0}]}).encode()
    yield b"\xff" + json.dumps({"data": [{"embedding": base64.b64encode(b"\xff" * 12).decode()}]}).encode()
    yield b"\x01" + json.dumps({"data": []}).encode()


def _load(data: bytes) -> Any:
    """The cut; and lines, as trees where they are JSON."""
    return [data[0], [_tree(line) for line in data[1:].decode().split("\n")]]


def _tree(line: str) -> Any:
    return {"data": json.loads(line[5:])} if line.startswith("data: {") else line


def _dump(tree: Any) -> bytes:
    lines = [f"data: {json.dumps(line['data'])}" if isinstance(line, dict) else str(line) for line in tree[1]]
    return bytes([tree[0] % 256]) + "\n".join(lines).encode()


_streams = within(_load, _dump, ("choices", "token_ids", "finish_reason", "stop", "length", "error", "text"))
_vectors = within(
    lambda data: [data[0] | 1, json.loads(data[1:])], lambda tree: bytes([tree[0] % 256]) + json.dumps(tree[1]).encode()
)


def mutate(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    return (_vectors if data[:1] and data[0] % 2 else _streams)(data, max_bytes, seed, mutate_bytes)
