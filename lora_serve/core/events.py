"""What the engine tells its client: one list of these per step."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.errors import LoraServeError
from lora_serve.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural log, of the raw model distribution) of one token and of the best ones there."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent before the first token."""

    queue: float  # waiting for a place, adapter loading not counted
    load: float  # waiting for the adapter's weights
    prefill: float  # from the first scheduled chunk to the first token


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """The request waits no longer: its first tokens are in a step. Between engine and client only."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The prompt is computed; always the first event of a request that is not refused."""

    request_id: str
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None  # one per prompt token, the first is None
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found, not computed
    fell_back: bool = False  # the request's `fallback` answers, not its `adapters`


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token."""

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class PooledEvent:
    """The vector of a request with `pooling`: an embedding, normalised if the model says so, or labels' logits."""

    request_id: str
    values: bytes  # float32, little-endian


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The sequence ended well; `stop_token_id` is the end-of-text or stop id that ended it, if one did."""

    request_id: str
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The sequence ended badly; nothing follows."""

    request_id: str
    error: LoraServeError


Event = PromptEvent | TokenEvent | PooledEvent | FinishEvent | ErrorEvent  # what a caller gets
StepEvent = Event | StartedEvent  # what a step tells
