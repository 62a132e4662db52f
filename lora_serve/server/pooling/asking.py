"""What the pooling APIs share: body -> adapters -> requests for the engine -> vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web

from lora_serve.core.request import InferenceRequest, PoolingParams
from lora_serve.server.adapter_set import AdapterSet
from lora_serve.server.context import CONTEXT
from lora_serve.server.fallback import Fallback
from lora_serve.server.openai.chosen import choose_adapters, choose_fallback, note_answerers, sender_of
from lora_serve.server.pooling.inputs import Input, InputRules, encode_inputs
from lora_serve.server.pooling.running import run_pooled
from lora_serve.server.sampling import Sender, inference_request
from lora_serve.server.schemas.request import RequestFields
from lora_serve.server.services import SERVICES
from lora_serve.text.tokenizer import EncodedInput

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """One vector for each input."""

    vectors: tuple[bytes, ...]  # float32, little-endian
    adapters: AdapterSet  # that made them
    model: str  # their names
    num_tokens: int

    @property
    def arrays(self) -> list[Vector]:
        return [np.frombuffer(vector, "<f4") for vector in self.vectors]

    @property
    def usage(self) -> dict[str, Any]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


class Asking:
    """One request that is to be answered by vectors. Raises AdapterNotFoundError, InvalidRequestError."""

    def __init__(self, request: web.Request, fields: RequestFields) -> None:
        self._request = request
        self._fields = fields
        self.adapters = choose_adapters(request, fields)
        self._fallback: Fallback | None = choose_fallback(request, fields, self.adapters)

    @property
    def candidates(self) -> tuple[AdapterSet, ...]:
        """Who may answer."""
        return (self.adapters,) if self._fallback is None else (self.adapters, self._fallback.adapters)

    async def answer(self, inputs: Sequence[Input], rules: InputRules) -> PooledAnswer:
        """Pool them all. Raises InvalidRequestError, and whatever error one of them ends with."""
        services, context = self._request.app[SERVICES], self._request[CONTEXT]
        vocabulary = self.adapters.vocabulary_of
        encoded = await encode_inputs(services.text_of(vocabulary), services.spec_of(vocabulary), inputs, rules)
        requests = self._requests(encoded)
        note_answerers(self._request, self.adapters, self._fallback, requests)
        context.num_prompt_tokens = sum(len(item.token_ids) for item in encoded)
        vectors, fell_back = await run_pooled(services, context, requests)
        assert context.answerer is not None, "it was noted above"
        adapters = self._fallback.adapters if fell_back and self._fallback is not None else self.adapters
        return PooledAnswer(tuple(vectors), adapters, context.answerer.model, context.num_prompt_tokens)

    def _requests(self, encoded: list[EncodedInput]) -> list[InferenceRequest]:
        sender = sender_of(self._request, self.adapters)
        return [self._one(number, item, sender) for number, item in enumerate(encoded)]

    def _one(self, number: int, item: EncodedInput, sender: Sender) -> InferenceRequest:
        uses = self.adapters.uses_in(item.token_ids)
        other = self._fallback.adapters.uses_in(item.token_ids) if self._fallback is not None and uses else None
        params = PoolingParams(item.type_ids if any(item.type_ids) else ())
        name = f"{sender.request_id}-{number}"
        return inference_request(self._fields, name, item.token_ids, uses, other, sender, params)
