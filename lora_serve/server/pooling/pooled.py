"""Inputs of one request, pooled together: one vector for each, or none at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from aiohttp import web
from msgspec import Struct

from lora_serve.core.errors import InternalError
from lora_serve.core.messages import FinishEvent, PooledEvent, TokenEvent
from lora_serve.server.adapter_set import AdapterSet
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.requests import pooling_requests
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.inference.rows import Rows
from lora_serve.server.pooling.inputs import Input, InputRules, encode_inputs
from lora_serve.server.schemas.pooling import PoolingFields
from lora_serve.server.services import SERVICES

MAX_IN_FLIGHT = 256  # of one answer: more than a step takes, and not the whole queue of all callers
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


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
        rows.way = services.overflow.way_of(request, model.adapters, model.spec, requests, is_whole=True)
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
