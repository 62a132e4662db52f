"""A row as the body of a request to a neighbour: token ids and numbers, all defaults worked in.

The prompt is the ids that this server made of the chat template and the tokenizer of the adapter, and the answer is
asked for as ids too: templates, tools, reasoning, stop strings and the forms of all APIs stay here, whoever computes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from lora_serve.core.request import InferenceRequest, OnCold


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
