"""Texts, pairs of texts and token ids -> one vector each; and POST /v1/embeddings"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web
from msgspec import Struct

from lora_serve.core.errors import InternalError, InvalidRequestError
from lora_serve.core.messages import FinishEvent, PooledEvent, TokenEvent
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import Task
from lora_serve.server.answers import json_answer
from lora_serve.server.context import CONTEXT, AdapterSet
from lora_serve.server.inference.prompts import (
    chat_messages,
    chat_prompt,
    check_can_fit,
    prompt_limit,
    read_prompts,
    thread_if_long,
)
from lora_serve.server.inference.requests import check_vocabulary, pooling_requests
from lora_serve.server.inference.resolve import ResolvedModel, resolve
from lora_serve.server.inference.rows import Rows
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.schemas.pooling import EmbeddingFields, InputFields, PoolingFields
from lora_serve.server.services import SERVICES
from lora_serve.text.tokenizer import EncodedInput, TextModel

MAX_INPUTS = 2048
MAX_IN_FLIGHT = 256  # of one answer: more than a step takes, and not the whole queue of all callers
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that the model reads as one."""

    first: str
    second: str


Input = str | Sequence[int] | TextPair


@dataclass(frozen=True, slots=True)
class InputRules:
    """How inputs become tokens. `truncate`: to so many tokens, -1: to the model's limit, None: refuse longer ones.

    `side`: where they lose them; None: on the tokenizer's own.
    """

    param: str
    add_special_tokens: bool = True
    truncate: int | None = None
    side: str | None = None


async def read_inputs(fields: InputFields, model: ResolvedModel) -> tuple[Sequence[Input], InputRules]:
    """The texts or token ids of `input`, or the chats of `messages` (or `input`) as token ids.

    Raises InvalidRequestError.
    """
    if (fields.input is None) == (fields.messages is None):
        raise InvalidRequestError("Send `input` or `messages`, one of them.", param="input")
    param, value = ("input", fields.input) if fields.messages is None else ("messages", fields.messages)
    chats = value if value and isinstance(value, list) and all(isinstance(item, list) for item in value) else [value]
    cut = fields.truncate_prompt_tokens, fields.truncation_side
    if param == "input" and not all(chat and isinstance(chat, list) and isinstance(chat[0], dict) for chat in chats):
        for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(fields, name):
                raise InvalidRequestError(f"`{name}` goes with `messages`: no template reads texts.", param=name)
        texts = await read_prompts(value, "input", MAX_INPUTS)
        return texts, InputRules("input", fields.add_special_tokens is not False, *cut)
    if not model.text.template.source:
        raise InvalidRequestError("This model has no chat template: send texts as `input`.", param=param)
    check_count(chats, param)
    found = []
    for chat in chats:
        messages = await chat_messages(chat)
        found.append(await chat_prompt(model.text, model.spec, fields, messages, hint=model.hint))
        await asyncio.sleep(0)
    return found, InputRules(param, False, *cut)


async def encode_inputs(
    text: TextModel, spec: ModelSpec, inputs: Sequence[Input], rules: InputRules
) -> list[EncodedInput]:
    """Encode the inputs, in their order. Raises InvalidRequestError."""
    limit = prompt_limit(rules.truncate, spec)
    texts = [part for item in inputs for part in _texts_of(item)]
    if not all(texts) or not all(inputs):
        raise InvalidRequestError(f"`{rules.param}` must not be empty, nor hold anything empty.", param=rules.param)
    if limit is None:
        for part in texts:
            check_can_fit(text, spec, part, rules.param)
    encoder = _InputEncoder(text, spec, rules, limit)
    return await thread_if_long(sum(map(_length_of, inputs)), lambda: [encoder.encode(item) for item in inputs])


@dataclass(frozen=True, slots=True)
class _InputEncoder:
    text: TextModel
    spec: ModelSpec
    rules: InputRules
    limit: int | None

    def encode(self, item: Input) -> EncodedInput:
        found = self._encoded(item)
        longest, count = self.spec.max_model_len, len(found.token_ids)
        if count > longest:
            raise InvalidRequestError(
                f"This model's maximum context length is {longest} tokens. However, your `{self.rules.param}` holds "
                f"an input of {count} tokens. Shorten it, or send `truncate_prompt_tokens`: -1 to have it cut.",
                param=self.rules.param,
                code="context_length_exceeded",
            )
        if not count:
            raise InvalidRequestError("An input must give at least one token.", param=self.rules.param)
        return found

    def _encoded(self, item: Input) -> EncodedInput:
        if isinstance(item, TextPair):
            found = self.text.encode_input(item.first, item.second, max_tokens=self.limit, side=self.rules.side)
        elif not isinstance(item, str):
            check_vocabulary(item, self.spec, self.rules.param)
            return EncodedInput(self._cut(item), ())
        else:
            special, side = self.rules.add_special_tokens, self.rules.side
            prepared = self.text.preparation.of(item) if self._is_embedding else item
            found = self.text.encode_input(prepared, add_special_tokens=special, max_tokens=self.limit, side=side)
        return found if self._takes_pairs else EncodedInput(found.token_ids, ())

    def _cut(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Token ids have no special tokens that a cut would have to keep."""
        if self.limit is None:
            return tuple(token_ids)
        side = self.rules.side or self.text.truncation_side
        return tuple(token_ids[: self.limit] if side == "right" else token_ids[-self.limit :])

    @property
    def _is_embedding(self) -> bool:
        return self.spec.pooling is not None and self.spec.pooling.task is Task.EMBED

    @property
    def _takes_pairs(self) -> bool:
        return self.spec.pooling is not None and self.spec.pooling.takes_pairs


def check_count(inputs: Sequence[Any], param: str) -> None:
    """Raises InvalidRequestError if there are more inputs than MAX_INPUTS."""
    if len(inputs) > MAX_INPUTS:
        message = f"At most {MAX_INPUTS} inputs are allowed in one request (`{param}` has {len(inputs)})."
        raise InvalidRequestError(message, param=param)


def _length_of(item: Input) -> int:
    """The number of characters or token ids."""
    return len(item.first) + len(item.second) if isinstance(item, TextPair) else len(item)


def _texts_of(item: Input) -> tuple[str, ...]:
    match item:
        case str():
            return (item,)
        case TextPair():
            return (item.first, item.second)
        case _:
            return ()


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """One vector for each input."""

    vectors: tuple[bytes, ...]  # float32, little-endian
    adapters: AdapterSet  # that made them
    num_tokens: int

    @property
    def arrays(self) -> list[Vector]:
        return [np.frombuffer(vector, "<f4") for vector in self.vectors]

    @property
    def usage(self) -> PoolingUsage:
        return PoolingUsage(self.num_tokens, self.num_tokens)


async def pool(
    request: web.Request,
    fields: PoolingFields,
    model: ResolvedModel,
    inputs: Sequence[Input],
    rules: InputRules,
    *,
    may_leave: bool = False,
) -> PooledAnswer:
    """Pool all inputs; if they `may_leave`, perhaps as embeddings of a neighbour.

    Raises InvalidRequestError, and the error with which one of them ends.
    """
    context = request[CONTEXT]
    encoded = await encode_inputs(model.text, model.spec, inputs, rules)
    requests = pooling_requests(request, model, fields, encoded)
    services = request.app[SERVICES]
    rows = Rows(services, context, model, requests, max_in_flight=MAX_IN_FLIGHT)
    if services.overflow is not None and may_leave:
        rows.upstream = services.overflow.upstream_for(request, model.adapters, model.spec, requests, is_whole=True)
    vectors = [b""] * len(requests)
    async with rows.admitted():
        while not rows.is_over:
            number, event = await rows.next()
            match event:
                case PooledEvent():
                    vectors[number] = event.values
                case FinishEvent():
                    rows.end(number, event.reason)
                case TokenEvent():
                    raise InternalError(f"The engine continued {event.request_id}, which was to be pooled.")
    assert context.adapters is not None, "they were resolved"
    return PooledAnswer(tuple(vectors), context.adapters, context.num_prompt_tokens)


class Embedding(Struct, tag_field="object", tag="embedding"):
    index: int
    embedding: list[float] | str  # text: float32, little-endian, in base64


class Embeddings(Struct, tag_field="object", tag="list"):
    model: str
    usage: PoolingUsage
    data: list[Embedding]


async def create_embedding(request: web.Request) -> web.StreamResponse:
    """Embed texts."""
    fields = check_fields(EmbeddingFields, await read_json(request))
    _check_dimensions(fields.dimensions, request.app[SERVICES].spec)
    model = resolve(request, fields)
    inputs, rules = await read_inputs(fields, model)
    answer = await pool(request, fields, model, inputs, rules, may_leave=True)
    normalizes = model.spec.pooling is not None and model.spec.pooling.is_normalized
    is_unit = normalizes if fields.use_activation is None else fields.use_activation
    vectors = [shortened(vector, fields.dimensions, is_unit=is_unit) for vector in answer.vectors]

    def made() -> Embeddings:
        data = [Embedding(index, _shown(vector, fields)) for index, vector in enumerate(vectors)]
        return Embeddings(answer.adapters.model, answer.usage, data)

    return await json_answer(request, made, sum(map(len, vectors)) // 4)


def shortened(vector: bytes, dimensions: int | None, *, is_unit: bool) -> bytes:
    """The first `dimensions` numbers (Matryoshka: Kusupati et al., 2022, arXiv 2205.13147); of length 1 if asked."""
    if dimensions is None or 4 * dimensions >= len(vector):
        return vector
    head = np.frombuffer(vector, "<f4", dimensions).astype(np.float64)
    norm = float(np.linalg.norm(head)) if is_unit else 1.0
    return (head / norm if norm else head).astype("<f4").tobytes()


def _shown(vector: bytes, fields: EmbeddingFields) -> list[float] | str:
    values = np.frombuffer(vector, "<f4")
    if fields.encoding_format == "base64":
        return base64.b64encode(packed(values, fields.embed_dtype, fields.endianness)).decode()
    numbers: list[float] = values.tolist()
    return numbers


def packed(values: Vector, embed_dtype: str, endianness: str) -> bytes:
    """The numbers rounded to the nearest ones of `embed_dtype`, ties to even, in this order of bytes."""
    if embed_dtype == "bfloat16":
        bits = values.view("<u4")
        made = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    else:
        with np.errstate(over="ignore"):  # to infinity
            made = values.astype(embed_dtype)
    return bytes(made.astype(made.dtype.newbyteorder("big" if endianness == "big" else "little")))


def _check_dimensions(dimensions: int | None, spec: ModelSpec) -> None:
    longest = spec.pooling.dimension if spec.pooling is not None else 0
    if dimensions is not None and dimensions > longest:
        message = f"`dimensions` must be from 1 to {longest}, which is what this model gives (got {dimensions})."
        raise InvalidRequestError(message, param="dimensions")
