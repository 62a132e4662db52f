"""Residency commands for the engine: what the admin may ask of the adapter tiers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import BatchLimits
from lora_serve.core.errors import InvalidRequestError


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
