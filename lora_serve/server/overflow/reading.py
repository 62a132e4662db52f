"""A neighbour's answer -> events. Nothing of it is believed before it was looked at, and no more of it is read than an
answer can hold.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from aiohttp import ClientResponse

from lora_serve.core.messages import FinishEvent, PooledEvent, TokenEvent
from lora_serve.core.request import FinishReason, InferenceRequest
from lora_serve.server.overflow.outcome import NeighbourError, Outcome

MAX_LINE = 2**18  # bytes; with a prompt's ids, which some send back
MAX_ID_BYTES = 16  # of a token id in JSON
BYTES_PER_TOKEN = 4096  # an event with one token has some 400
_DONE = b"[DONE]"
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # from msgspec's decoder


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Vector(msgspec.Struct):
    embedding: str


class _Vectors(msgspec.Struct):
    data: list[_Vector]


async def tokens_of(
    response: ClientResponse, request: InferenceRequest, vocab_size: int, ends: frozenset[int]
) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
    """The tokens of a streamed completion, and its end once the stream is over. Raises NeighbourError."""
    _check_type(response, "text/event-stream")
    sampling, last, count, finish = request.sampling, None, 0, None
    num_bytes = 2 * MAX_LINE + MAX_ID_BYTES * len(request.prompt_token_ids) + BYTES_PER_TOKEN * sampling.max_tokens
    async for choice in _choices(response, num_bytes):
        if choice.token_ids is None and (choice.text or (choice.finish_reason is not None and not count)):
            raise NeighbourError(Outcome.GARBLED, "its answers have no token ids (`return_token_ids`)")
        for last in choice.token_ids or ():
            count += 1
            if not 0 <= last < vocab_size or count > sampling.max_tokens or finish is not None:
                raise NeighbourError(Outcome.GARBLED, "it sent tokens that were not asked for")
            yield TokenEvent(request.request_id, last, None)
        if choice.finish_reason is not None:
            if choice.finish_reason not in ("stop", "length"):
                raise NeighbourError(Outcome.BROKEN, "it ended its answer for a reason of its own")
            finish = FinishReason(choice.finish_reason)
    if finish is None:
        raise NeighbourError(Outcome.BROKEN, "its stream ended in the middle")
    is_end = finish is FinishReason.STOP and last in ends
    yield FinishEvent(request.request_id, finish, last if is_end else None)


async def vector_of(
    response: ClientResponse, request: InferenceRequest, dimension: int
) -> AsyncGenerator[PooledEvent | FinishEvent, None]:
    """The one vector of an answer of /v1/embeddings, and the end. Raises NeighbourError."""
    _check_type(response, "application/json")
    most, text = 2**16 + 8 * dimension, bytearray()
    async for part in response.content.iter_any():
        text += part
        if len(text) > most:
            raise NeighbourError(Outcome.GARBLED, "its answer is too long")
    try:
        (vector,) = msgspec.json.decode(bytes(text), type=_Vectors).data
        values = base64.b64decode(vector.embedding, validate=True)
        numbers = struct.unpack(f"<{dimension}f", values)
    except (*NOT_JSON, ValueError, binascii.Error, struct.error):
        raise NeighbourError(Outcome.GARBLED, "its answer is no vector of this model's length") from None
    if not all(map(math.isfinite, numbers)):
        raise NeighbourError(Outcome.GARBLED, "its vector holds no numbers")
    yield PooledEvent(request.request_id, values)
    yield FinishEvent(request.request_id, FinishReason.STOP)


async def _choices(response: ClientResponse, num_bytes: int) -> AsyncIterator[_Choice]:
    """The choices of a stream until its end, read to the last byte, so that its connection can be used again."""
    decoder, is_done = msgspec.json.Decoder(_Chunk), False
    async for data in _events(response, num_bytes):
        if is_done or data == _DONE:
            is_done = True
            continue
        try:
            chunk = decoder.decode(data)
        except NOT_JSON:
            raise NeighbourError(Outcome.GARBLED, "its stream holds no chunks of a completion") from None
        if chunk.error is not None:
            raise NeighbourError(Outcome.FAILED, "its stream ended with an error")
        for choice in chunk.choices:
            yield choice


async def _events(response: ClientResponse, num_bytes: int) -> AsyncIterator[bytes]:
    """The data of server-sent events of one line each."""
    rest = b""
    async for part in response.content.iter_any():
        num_bytes -= len(part)
        *lines, rest = (rest + part).split(b"\n")
        if num_bytes < 0 or len(rest) > MAX_LINE:
            raise NeighbourError(Outcome.GARBLED, "its answer is too long")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _check_type(response: ClientResponse, wanted: str) -> None:
    if response.content_type != wanted:
        raise NeighbourError(Outcome.GARBLED, f"its answer is no {wanted}")
