"""One request as the engine sees it: token ids and numbers, no text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from lora_serve.core.adapter import AdapterRef, AddedToken
from lora_serve.core.tenant import WARM_UP


class OnCold(enum.StrEnum):
    """The treatment of a request whose adapter is not in device or host memory when its `max_cold_wait` is over.

    The adapter's load goes on for the next caller in any case.
    """

    WAIT = "wait"  # AdapterUnavailableError; without `max_cold_wait` the request waits for ever
    BASE = "base"  # the base model answers
    PREVIOUS = "previous"  # the version before answers; if that is cold too, the one of the two that is loaded first
    FAIL = "fail"  # AdapterUnavailableError


class FinishReason(enum.StrEnum):
    """The reason why a sequence ended, in OpenAI's words; ABORT never reaches a client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The rules by which the next token is chosen; defaults are OpenAI's. Ids are known to the vocabulary."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # nucleus mass in (0, 1]
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # share of the best token's probability
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # no other token may come; empty: all may
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that may not come one after another in the answer
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()  # of the adapters and of the tokenizer, beside the model's
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    prompt_logprobs: int | None = None  # likewise for each prompt token

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def ends(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end the answer. `eos_token_ids`: the model's own."""
        return self.stop_token_ids + (() if self.ignore_eos else eos_token_ids + self.eos_token_ids)


class Task(enum.StrEnum):
    """The task of a server, one for all prompts: the model's head decides it."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """A prompt that is answered by one vector, in one step: its embedding, or its labels' logits."""

    token_type_ids: tuple[int, ...] = ()  # one per prompt token, for a pair of texts; empty: all 0
    is_unit: bool | None = None  # an embedding's length is made 1, or left; None: as the model says


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter of a request: its deltas count `scale` times, from token position `start` of the sequence on."""

    ref: AdapterRef
    scale: float = 1.0
    start: int = 0


@dataclass(frozen=True, slots=True)
class TokenGrammar:
    """A grammar that the whole answer obeys, in the text form of `llguidance`; compiled once already, so it is valid.

    `added_tokens`: the tokens that the request's vocabulary has beyond the base model's.
    """

    text: str
    added_tokens: tuple[AddedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One prompt to be continued; or with `pooling`, which makes `sampling` void, one to be answered by a vector.

    Times are seconds of `time.monotonic()` on the machine that holds the object.
    """

    request_id: str  # made by the server, never the client's
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    adapters: tuple[AdapterUse, ...] = ()  # added up; empty: the base model
    tenant: str = "default"  # the prompt's owner: no other tenant may find its KV blocks
    cache_scope: str = ""  # owner of the KV blocks that may be reused, if not `tenant`: it was deleted and made again
    account: str = ""  # whose share of the engine is used; empty: the tenant's
    priority: int = 0  # lower runs first, as in vLLM
    arrival_time: float = 0.0
    deadline: float | None = None
    on_cold: OnCold = OnCold.WAIT
    max_cold_wait: float | None = None  # seconds; None: for ever with WAIT, else 0
    fallback: tuple[AdapterUse, ...] | None = None  # the adapters that answer instead: () with BASE; None: no fallback
    pooling: PoolingParams | None = None
    grammar: TokenGrammar | None = None  # None: any token may come
    answer_id: str = ""  # requests with the same one are choices of one answer: the same adapters answer all of them
    is_salted: bool = False  # `cache_scope` holds the caller's salt: only requests with the same one find its KV blocks
    fallback_eos_token_ids: tuple[int, ...] = ()  # in place of the sampling's, if the fallback answers

    def on_clock(self, offset: float) -> InferenceRequest:
        """The same request for a machine whose `time.monotonic()` is `offset` seconds ahead of this one's."""
        if offset == 0.0:
            return self
        deadline = None if self.deadline is None else self.deadline + offset
        return replace(self, arrival_time=self.arrival_time + offset, deadline=deadline)

    def by_fallback(self) -> InferenceRequest:
        """The same request, to be answered by its fallback's adapters."""
        sampling = replace(self.sampling, eos_token_ids=self.fallback_eos_token_ids)
        return replace(self, sampling=sampling, adapters=self.fallback or (), fallback=None)

    @property
    def cold_timeout(self) -> float | None:
        """Seconds from arrival that the request waits for cold adapters; None: for ever."""
        if self.max_cold_wait is None:
            return None if self.on_cold is OnCold.WAIT else 0.0
        return self.max_cold_wait

    @property
    def is_warm_up(self) -> bool:
        """True for a request that no client sent: it is work of the engine, and no traffic."""
        return self.tenant.startswith(WARM_UP)

    @property
    def scope(self) -> str:
        """The owner of what is kept of earlier requests: KV blocks, grammars, n-grams of answers."""
        return self.cache_scope or self.tenant

    @property
    def refs(self) -> tuple[AdapterRef, ...]:
        """The adapters that the request needs on the device."""
        return tuple(use.ref for use in self.adapters)
