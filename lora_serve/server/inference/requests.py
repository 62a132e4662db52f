"""Fields of a body and token ids of its prompts -> InferenceRequests, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import AdapterUse, InferenceRequest, OnCold, PoolingParams, SamplingParams, TokenGrammar
from lora_serve.server.context import CONTEXT, AdapterSet
from lora_serve.server.inference.defaults import MAX_TOKENS_NAMES
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.schemas.inference import RequestFields, SamplingFields
from lora_serve.server.schemas.pooling import PoolingFields
from lora_serve.server.services import SERVICES
from lora_serve.text.tokenizer import EncodedInput, TextModel

Prompt = tuple[int, ...]
MANY_LOGPROBS = 1000  # a token; where more are asked for, all of an answer are counted
MAX_LOGPROB_VALUES = 2**22  # some 600 MB in this process
# Of SamplingParams, as requests have them.
_SAME = (
    "min_tokens", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The limits that each generating API spells in its own way."""

    max_tokens: int | None  # None: as many as the prompt leaves room for
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_field: str = "prompt"
    at_most: int | None = None  # if `max_tokens` is None: an adapter's own default


def generation_requests(
    request: web.Request,
    model: ResolvedModel,
    fields: SamplingFields,
    limits: TokenLimits,
    prompts: Sequence[Prompt],
    grammar: TokenGrammar | None = None,
) -> list[InferenceRequest]:
    """`fields.num_rows` requests for each prompt, in the order of the choices. Raises InvalidRequestError."""
    most = request.app[SERVICES].config.max_logprobs
    limits = _of_vocabulary(_own_limits(limits, model, fields), model.spec.vocab_size, most)
    params = _sampling_params(fields, model, limits)
    template = replace(_template(request, model, fields), grammar=grammar)
    if fields.cache_salt is not None:
        template = replace(template, cache_scope=_salted(template, fields.cache_salt), is_salted=True)
    made: list[InferenceRequest] = []
    num_values = 0
    for prompt in prompts:
        longest = max_tokens_for(len(prompt), limits, model.spec.max_model_len)
        num_values += len(prompt) * (limits.prompt_logprobs or 0) + longest * fields.num_rows * (limits.logprobs or 0)
        _check_min_tokens(fields.min_tokens, longest)
        row = _row(template, model, prompt)
        for index in range(fields.num_rows):
            seed = None if fields.seed is None else (fields.seed + index) % 2**64
            sampling = replace(params, max_tokens=longest, seed=seed)
            made.append(replace(row, request_id=f"{template.request_id}-{len(made)}", sampling=sampling))
    _check_num_logprobs(num_values, limits)
    _note_prompts(request, model, prompts)
    return made


def pooling_requests(
    request: web.Request, model: ResolvedModel, fields: PoolingFields, inputs: Sequence[EncodedInput]
) -> list[InferenceRequest]:
    """One request for each input, to be answered by a vector."""
    template = _template(request, model, fields)
    made = [
        replace(
            _row(template, model, item.token_ids),
            request_id=f"{template.request_id}-{number}",
            pooling=PoolingParams(item.type_ids if any(item.type_ids) else (), fields.use_activation),
        )
        for number, item in enumerate(inputs)
    ]
    _note_prompts(request, model, [item.token_ids for item in inputs])
    return made


def max_tokens_for(num_prompt_tokens: int, limits: TokenLimits, max_model_len: int) -> int:
    """The number of tokens that may be generated, at least 1: even a request for none (echo only) takes a step.

    Raises InvalidRequestError if prompt and answer do not fit the context.
    """
    left = max_model_len - num_prompt_tokens
    asked = max(1, min(left, limits.at_most or left) if limits.max_tokens is None else limits.max_tokens)
    if asked > left:
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


def _own_limits(limits: TokenLimits, model: ResolvedModel, fields: SamplingFields) -> TokenLimits:
    """The limits with the adapter's own default, for a request that says nothing of the number of tokens."""
    if model.defaults.max_tokens is None or fields.model_fields_set & MAX_TOKENS_NAMES:
        return limits
    return replace(limits, max_tokens=None, at_most=model.defaults.max_tokens)


def _of_vocabulary(limits: TokenLimits, vocab_size: int, most: int) -> TokenLimits:
    """The limits with the size of the vocabulary for -1. Raises InvalidRequestError for more than `most` allow."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(limits, name) == -1:
            if 0 <= most < vocab_size:
                text = f"`{name}`: -1 asks for all {vocab_size} tokens; at most {most} are allowed (--max-logprobs)."
                raise InvalidRequestError(text, param=name)
            limits = replace(limits, **{name: vocab_size})  # type: ignore[arg-type]
    return limits


def _check_num_logprobs(num_values: int, limits: TokenLimits) -> None:
    """Raises InvalidRequestError for more numbers than an answer with so many a token may hold."""
    many = [name for name in ("logprobs", "prompt_logprobs") if (getattr(limits, name) or 0) > MANY_LOGPROBS]
    if many and num_values > MAX_LOGPROB_VALUES:
        raise InvalidRequestError(
            f"`{many[0]}`: the answer would hold {num_values} log-probabilities; at most {MAX_LOGPROB_VALUES} go into "
            "one answer: shorten the prompt, lower max_tokens, or ask for fewer.",
            param=many[0],
        )


def _sampling_params(fields: SamplingFields, model: ResolvedModel, limits: TokenLimits) -> SamplingParams:
    """All but `max_tokens`, which depends on the prompt. Raises InvalidRequestError."""
    check_vocabulary(fields.stop_token_ids, model.spec, "stop_token_ids")
    allowed = fields.allowed_token_ids
    check_vocabulary(allowed, model.spec, "allowed_token_ids")
    biases = biases_of(model.text, fields.logit_bias) if fields.logit_bias else ()
    check_vocabulary((token_id for token_id, _ in biases), model.spec, "logit_bias")
    return SamplingParams(
        **{name: getattr(fields, name) for name in _SAME},
        top_k=max(0, fields.top_k),
        logit_bias=biases,
        allowed_token_ids=tuple(dict.fromkeys(allowed)),
        bad_words=bad_word_ids(model.text, fields.bad_words) if fields.bad_words else (),
        stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids)),
        eos_token_ids=_eos_token_ids(model, model.adapters),
        logprobs=limits.logprobs,
        prompt_logprobs=limits.prompt_logprobs,
    )


def _salted(template: InferenceRequest, salt: str) -> str:
    """A scope of the prefix cache in which only requests of the same tenant with the same salt find anything."""
    return f"{template.scope}\0salt\0{salt}"


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"`min_tokens` ({min_tokens}) must not exceed the tokens that may be generated ({max_tokens}).",
            param="min_tokens",
        )


def _template(request: web.Request, model: ResolvedModel, fields: RequestFields) -> InferenceRequest:
    """The fields that all rows of one answer have in common."""
    context = request[CONTEXT]
    caller, members = context.known_caller, model.adapters.members
    timeout, cold_wait = fields.timeout_ms, fields.max_cold_wait_ms
    return InferenceRequest(
        request_id=context.request_id,
        prompt_token_ids=(),
        tenant=caller.tenant,
        # A caller who may use everybody's adapters acts for their owners.
        account=members[0].ref.tenant if caller.sees_all and members else caller.tenant,
        cache_scope=caller.cache_scope,
        priority=fields.priority,
        arrival_time=context.started,
        deadline=None if timeout is None else context.started + timeout / 1000,
        on_cold=OnCold(fields.on_cold),
        max_cold_wait=None if cold_wait is None else cold_wait / 1000,
        fallback_eos_token_ids=() if model.fallback is None else _eos_token_ids(model, model.fallback),
        answer_id=context.request_id,
    )


def _row(template: InferenceRequest, model: ResolvedModel, prompt: Prompt) -> InferenceRequest:
    uses = _uses(model.adapters, prompt)
    fallback = _uses(model.fallback, prompt) if model.fallback is not None and uses else None
    return replace(template, prompt_token_ids=prompt, adapters=uses, fallback=fallback)


def _uses(adapters: AdapterSet, prompt: Prompt) -> tuple[AdapterUse, ...]:
    """The members that act in an answer to this prompt.

    Sorted by digest, as sums of floats depend on their order, and the answer must not depend on the caller's.
    """
    starts = [(member, member.ref.start_in(prompt)) for member in adapters.members]
    uses = [AdapterUse(member.ref, member.scale, start) for member, start in starts if start is not None]
    return tuple(sorted(uses, key=lambda use: use.ref.digest))


def _eos_token_ids(model: ResolvedModel, adapters: AdapterSet) -> tuple[int, ...]:
    """The tokens that end an answer of one of its sets, beside the model's own: the tokenizer's and the adapters'."""
    own = (token for one in adapters.members if one.scale for token in one.ref.traits.eos_token_ids)
    found = dict.fromkeys((*model.text.eos_token_ids, *own))
    return tuple(token for token in found if token < model.spec.vocab_size and token not in model.spec.eos_token_ids)


def _note_prompts(request: web.Request, model: ResolvedModel, prompts: Sequence[Prompt]) -> None:
    """For the answer's headers and the log."""
    context = request[CONTEXT]
    context.active = _activity(model.adapters, prompts)
    context.num_prompt_tokens = sum(map(len, prompts))


def _activity(adapters: AdapterSet, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """`1` or `0` for each adapter, or for several prompts in how many of them the adapter acts: `1/2`.

    Empty if no adapter has invocation tokens: then all of them always act.
    """
    if not any(member.ref.traits.invocation_tokens for member in adapters.members):
        return ()
    total = "" if len(prompts) == 1 else f"/{len(prompts)}"
    counts = [sum(member.ref.start_in(prompt) is not None for prompt in prompts) for member in adapters.members]
    return tuple(f"{count}{total}" for count in counts)


def biases_of(text: TextModel, biases: Sequence[tuple[int | str, float]]) -> tuple[tuple[int, float], ...]:
    """`logit_bias` by token id. Raises InvalidRequestError for a text that is not exactly one token."""
    return tuple((_token_of(text, key) if isinstance(key, str) else key, bias) for key, bias in biases)


def bad_word_ids(text: TextModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """`bad_words` as the tokens they may be written in: at the beginning of a text and, if that makes another first
    token and as many of them, behind a space. That is vLLM's rule.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (text.encode(before + word.lstrip(), add_special_tokens=False) for before in ("", " "))
        if not plain:
            raise InvalidRequestError(f"`bad_words`: {word[:32]!r} gives no tokens.", param="bad_words")
        found[plain] = None
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found[spaced] = None
    return tuple(found)


def _token_of(text: TextModel, key: str) -> int:
    token_ids = text.encode(key, add_special_tokens=False)
    if len(token_ids) != 1 or text.decode(token_ids, skip_special_tokens=False).strip() != key.strip():
        raise InvalidRequestError(
            f"`logit_bias`: {key[:32]!r} is not exactly one token of this model; give token ids (POST /tokenize).",
            param="logit_bias",
        )
    return token_ids[0]
