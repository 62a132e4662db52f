"""One request as the engine sees it: token ids and numbers, no words."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from lora_serve.core.adapter import AdapterRef


class OnCold(enum.StrEnum):
    """What to do when a request's adapter is not on the device yet."""

    WAIT = "wait"  # wait, at most `max_cold_wait` seconds if that is given
    FAIL = "fail"  # refuse at once with AdapterUnavailableError, and load the adapter for the next caller


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words; ABORT never reaches a client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; defaults are OpenAI's. Ids are already checked against the vocabulary."""

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
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    prompt_logprobs: int | None = None  # likewise for each prompt token

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter of a request: its deltas count `scale` times, from token position `start` of the sequence on."""

    ref: AdapterRef
    scale: float = 1.0
    start: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate. Times are seconds of `time.monotonic()`."""

    request_id: str  # made by the server, never the client's
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    adapters: tuple[AdapterUse, ...] = ()  # added up; empty: the base model
    tenant: str = "default"
    priority: int = 0  # lower runs first, as in vLLM
    arrival_time: float = 0.0
    deadline: float | None = None
    on_cold: OnCold = OnCold.WAIT
    max_cold_wait: float | None = None  # seconds

    @property
    def refs(self) -> tuple[AdapterRef, ...]:
        """The adapters it needs on the device."""
        return tuple(use.ref for use in self.adapters)
