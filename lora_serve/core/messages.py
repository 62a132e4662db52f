"""The words that cross between the web and the engine: commands about adapters, and the events of each step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import BatchLimits
from lora_serve.core.errors import InvalidRequestError, LoraServeError
from lora_serve.core.request import FinishReason

# -- commands: residency commands for the engine, what the admin may ask of the adapter tiers ---------------------


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring the adapter onto the device if a slot is free or evictable, or to host memory; done when it is there."""

    adapter: AdapterRef
    to: Literal["device", "host"] = "device"


@dataclass(frozen=True, slots=True)
class Pin:
    """Prefetch, and never evict until unpinned."""

    adapter: AdapterRef


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let it be evicted again."""

    digest: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop it from device and host once no row holds it."""

    digest: str
    forget: bool = False  # its figures too: it is deleted, not only moved out


@dataclass(frozen=True, slots=True)
class Resize:
    """New limits of the tiers, at once; None: as it is. Adapters in use leave when their last row ends."""

    max_loras: int | None = None  # device slots
    device_bytes: int | None = None
    host_bytes: int | None = None
    max_cpu_loras: int | None = None


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """Bytes of a tenant's adapters on the device."""

    tenant: str
    guaranteed: int = 0  # others' newcomers never push it below these
    at_most: int | None = None  # beyond these its newcomer pushes out its own, or waits


@dataclass(frozen=True, slots=True)
class SetTenantBudgets:
    """Budgets of all tenants that have one, from now on; what is there already stays until a newcomer comes."""

    budgets: tuple[TenantBudget, ...]


@dataclass(frozen=True, slots=True)
class SmokeTest:
    """Run a prompt with the base model and with the adapter, to see what it changes; answered by a SmokeTestResult."""

    adapter: AdapterRef
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SmokeTestResult:
    """The largest differences between two runs' logits."""

    logit_change: float  # base against adapter; NaN if the adapter gives no numbers
    noise: float  # base against base, in the same batch
    logit_scale: float  # the base's own largest logit

    @property
    def is_noop(self) -> bool:
        """Whether the change is no more than rounding."""
        return not self.logit_change > max(8 * self.noise, 1e-6 * self.logit_scale)


@dataclass(frozen=True, slots=True)
class Tune:
    """New limits of the batcher, from the next step on; None: as it is. 0 turns off what may be off."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    batch_wait: float | None = None  # this and the targets: seconds
    preferred_batch_size: int | None = None
    ttft_target: float | None = None
    itl_target: float | None = None

    def applied_to(self, limits: BatchLimits) -> BatchLimits:
        """The limits as they will be. Raises InvalidRequestError for what cannot be in force together."""
        changes = {name: value for name, value in asdict(self).items() if value is not None}
        may_be_off = ("preferred_batch_size", "ttft_target", "itl_target")
        new = replace(limits, **changes | {name: None for name in may_be_off if changes.get(name) == 0})
        if new.max_num_batched_tokens < new.max_num_seqs:
            raise InvalidRequestError(
                f"`max_num_batched_tokens` ({new.max_num_batched_tokens}) must be at least `max_num_seqs` "
                f"({new.max_num_seqs}): each running row takes one token per step.",
                param="max_num_seqs" if self.max_num_batched_tokens is None else "max_num_batched_tokens",
            )
        return new


AdapterCommand = Prefetch | Pin | Unpin | Evict | Resize | SetTenantBudgets | SmokeTest | Tune

# -- events: what the engine tells its client, one list of these per step -----------------------------------------


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
