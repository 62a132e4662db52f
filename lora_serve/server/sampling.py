"""Fields of a request -> SamplingParams and InferenceRequests, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import AdapterUse, InferenceRequest, OnCold, PoolingParams, SamplingParams
from lora_serve.server.adapter_set import AdapterSet
from lora_serve.server.schemas.request import RequestFields
from lora_serve.server.schemas.sampling import SamplingFields


@dataclass(frozen=True, slots=True)
class Limits:
    """What differs between the APIs."""

    max_tokens: int | None  # None: whatever room the prompt leaves
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_field: str = "prompt"


@dataclass(frozen=True, slots=True)
class Sender:
    """Whose request it is and when it came; `arrival` is seconds of `time.monotonic()`."""

    request_id: str
    tenant: str
    arrival: float
    account: str = ""  # see InferenceRequest
    cache_scope: str = ""  # likewise


def sampling_params(fields: SamplingFields, spec: ModelSpec, limits: Limits) -> SamplingParams:
    """All but `max_tokens`, which depends on the prompt. Raises InvalidRequestError."""
    check_vocabulary(fields.stop_token_ids, spec, "stop_token_ids")
    check_vocabulary((token_id for token_id, _ in fields.logit_bias), spec, "logit_bias")
    return SamplingParams(
        min_tokens=fields.min_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(0, fields.top_k),
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=fields.logit_bias,
        seed=fields.seed,
        stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids)),
        ignore_eos=fields.ignore_eos,
        logprobs=limits.logprobs,
        prompt_logprobs=limits.prompt_logprobs,
    )


def requests_for(
    fields: SamplingFields,
    spec: ModelSpec,
    limits: Limits,
    prompts: list[tuple[int, ...]],
    adapters: AdapterSet,
    sender: Sender,
    fallback: AdapterSet | None = None,
) -> list[InferenceRequest]:
    """`fields.n` requests for each prompt, in the order of the choices; `fallback` may answer for cold adapters.

    Raises InvalidRequestError.
    """
    params = sampling_params(fields, spec, limits)
    requests: list[InferenceRequest] = []
    for prompt in prompts:
        room = max_tokens_for(len(prompt), limits, spec.max_model_len)
        _check_min_tokens(fields.min_tokens, room)
        uses = adapters.uses_in(prompt)
        other_uses = fallback.uses_in(prompt) if fallback is not None and uses else None
        for index in range(fields.n):
            seed = None if fields.seed is None else (fields.seed + index) % 2**64
            sampling = replace(params, max_tokens=room, seed=seed)
            name = f"{sender.request_id}-{len(requests)}"
            made = inference_request(fields, name, prompt, uses, other_uses, sender)
            requests.append(replace(made, sampling=sampling))
    return requests


def max_tokens_for(num_prompt_tokens: int, limits: Limits, max_model_len: int) -> int:
    """Tokens that may be generated, at least 1: even a request for none (echo only) takes a step.

    Raises InvalidRequestError if prompt and answer do not fit the context.
    """
    room = max_model_len - num_prompt_tokens
    asked = max(1, room if limits.max_tokens is None else limits.max_tokens)
    if asked > room:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the prompt, {asked} in the answer). "
            "Shorten the prompt or lower max_tokens.",
            param="max_tokens" if num_prompt_tokens < max_model_len else limits.prompt_field,
            code="context_length_exceeded",
        )
    return asked


def check_vocabulary(token_ids: Iterable[int], spec: ModelSpec, param: str) -> None:
    """Raises InvalidRequestError for the first id that is no token."""
    for token_id in token_ids:
        if not 0 <= token_id < spec.vocab_size:
            raise InvalidRequestError(
                f"`{param}` holds the token id {token_id}; this model's ids are 0 to {spec.vocab_size - 1}.",
                param=param,
            )


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"`min_tokens` ({min_tokens}) must not exceed the tokens that may be generated ({max_tokens}).",
            param="min_tokens",
        )


def inference_request(
    fields: RequestFields,
    name: str,
    prompt: tuple[int, ...],
    uses: tuple[AdapterUse, ...],
    other_uses: tuple[AdapterUse, ...] | None,
    sender: Sender,
    pooling: PoolingParams | None = None,
) -> InferenceRequest:
    """What every task's requests say; `other_uses` may answer for cold adapters."""
    timeout, cold_wait = fields.timeout_ms, fields.max_cold_wait_ms
    return InferenceRequest(
        request_id=name,
        prompt_token_ids=prompt,
        adapters=uses,
        tenant=sender.tenant,
        account=sender.account,
        cache_scope=sender.cache_scope,
        priority=fields.priority,
        arrival_time=sender.arrival,
        deadline=None if timeout is None else sender.arrival + timeout / 1000,
        on_cold=OnCold(fields.on_cold),
        max_cold_wait=None if cold_wait is None else cold_wait / 1000,
        fallback=other_uses,
        pooling=pooling,
        answer_id=sender.request_id,
    )
