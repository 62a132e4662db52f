"""A row as a request to a neighbour, and the neighbour's answer as events. Nothing of the answer is believed before it
was looked at, and no more of it is read than an answer can hold.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec
from aiohttp import ClientResponse

from lora_serve.core.messages import FinishEvent, PooledEvent, TokenEvent
from lora_serve.core.request import FinishReason, InferenceRequest, OnCold

MAX_LINE = 2**18  # bytes; with a prompt's ids, which some send back
MAX_ID_BYTES = 16  # of a token id in JSON
BYTES_PER_TOKEN = 4096  # an event with one token has some 400
_DONE = b"[DONE]"
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # from msgspec's decoder


class NeighbourOutcome(enum.StrEnum):
    """The end of a request to a neighbour. All but the first two and `BROKEN` streams are computed here then."""

    ANSWERED = "answered"
    LEFT = "left"  # the caller went away
    UNREACHABLE = "unreachable"  # no connection
    SLOW = "slow"  # no token in time
    BUSY = "busy"  # 429 or 503
    UNKNOWN_MODEL = "unknown_model"  # 404, or another version of the adapter
    FORBIDDEN = "forbidden"  # 401 or 403
    REFUSED = "refused"  # another status below 500
    FAILED = "failed"  # another status from 500 on, or an error in its stream
    GARBLED = "garbled"  # an answer that makes no sense
    BROKEN = "broken"  # it ended in the middle


class NeighbourError(Exception):
    """A neighbour has not answered; `str(error)` holds nothing of what was asked, nor of what came back."""

    def __init__(self, outcome: NeighbourOutcome, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.retry_after = retry_after  # seconds; 0: it said nothing of them


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
            raise NeighbourError(NeighbourOutcome.GARBLED, "its answers have no token ids (`return_token_ids`)")
        for last in choice.token_ids or ():
            count += 1
            if not 0 <= last < vocab_size or count > sampling.max_tokens or finish is not None:
                raise NeighbourError(NeighbourOutcome.GARBLED, "it sent tokens that were not asked for")
            yield TokenEvent(request.request_id, last, None)
        if choice.finish_reason is not None:
            if choice.finish_reason not in ("stop", "length"):
                raise NeighbourError(NeighbourOutcome.BROKEN, "it ended its answer for a reason of its own")
            finish = FinishReason(choice.finish_reason)
    if finish is None:
        raise NeighbourError(NeighbourOutcome.BROKEN, "its stream ended in the middle")
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
            raise NeighbourError(NeighbourOutcome.GARBLED, "its answer is too long")
    try:
        (vector,) = msgspec.json.decode(bytes(text), type=_Vectors).data
        values = base64.b64decode(vector.embedding, validate=True)
        numbers = struct.unpack(f"<{dimension}f", values)
    except (*NOT_JSON, ValueError, binascii.Error, struct.error):
        raise NeighbourError(NeighbourOutcome.GARBLED, "its answer is no vector of this model's length") from None
    if not all(map(math.isfinite, numbers)):
        raise NeighbourError(NeighbourOutcome.GARBLED, "its vector holds no numbers")
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
            raise NeighbourError(NeighbourOutcome.GARBLED, "its stream holds no chunks of a completion") from None
        if chunk.error is not None:
            raise NeighbourError(NeighbourOutcome.FAILED, "its stream ended with an error")
        for choice in chunk.choices:
            yield choice


async def _events(response: ClientResponse, num_bytes: int) -> AsyncIterator[bytes]:
    """The data of server-sent events of one line each."""
    rest = b""
    async for part in response.content.iter_any():
        num_bytes -= len(part)
        *lines, rest = (rest + part).split(b"\n")
        if num_bytes < 0 or len(rest) > MAX_LINE:
            raise NeighbourError(NeighbourOutcome.GARBLED, "its answer is too long")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _check_type(response: ClientResponse, wanted: str) -> None:
    if response.content_type != wanted:
        raise NeighbourError(NeighbourOutcome.GARBLED, f"its answer is no {wanted}")


def can_leave(request: InferenceRequest) -> bool:
    """False if a neighbour could not give the answer that this server would, or has no words for the request."""
    sampling, pooling = request.sampling, request.pooling
    if request.priority or request.fallback is not None or request.on_cold is not OnCold.WAIT:
        return False  # what they mean, they mean in this server's queue and for its caches
    if request.max_cold_wait is not None or request.grammar is not None:
        return False
    if pooling is not None:
        return not pooling.token_type_ids and pooling.is_unit is None
    is_random = sampling.temperature > 0
    return not (
        (sampling.seed is not None and is_random)  # its numbers are drawn otherwise elsewhere
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
        or sampling.bad_words
    )


def completion_body(
    request: InferenceRequest, model: str, ends: Sequence[int], stop: Sequence[str], salt: str
) -> dict[str, Any]:
    """The body of POST /v1/completions. All is written out, as other servers have other defaults.

    `ends`: the tokens that end the text. `stop`: strings at which the neighbour may end as well.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_token_ids,
        "stream": True,
        "return_token_ids": True,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        # The neighbour's checkpoint may name other ends than ours: only these count.
        "ignore_eos": True,
        "stop_token_ids": list(ends),
        "cache_salt": salt,
    }
    if sampling.min_tokens:
        body["min_tokens"] = sampling.min_tokens
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if stop:
        body["stop"] = list(stop)
    return body


def embedding_body(request: InferenceRequest, model: str) -> dict[str, Any]:
    """The body of POST /v1/embeddings."""
    return {"model": model, "input": request.prompt_token_ids, "encoding_format": "base64"}


def salt_of(request: InferenceRequest, secret: bytes) -> str:
    """The `cache_salt` that keeps one tenant's prompts from being found by another's requests at the neighbour, which
    sees one key for all of them.
    """
    return hmac.new(secret, request.scope.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
