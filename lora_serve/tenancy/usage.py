"""What is metered: figures that only grow, by whom they are of."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True)
class UsageKey:
    """Whose use, of what. Of several adapters together the names and versions are joined by "+"."""

    tenant: str
    adapter: str  # the base model's name for the base model
    version: str
    digest: str
    key: str = ""  # id of the API key; empty: nobody's request (residency), or authentication is off


@dataclass(frozen=True, slots=True)
class UsageFigures:
    """Sums. Seconds are of sequences, so that two that ran side by side for a second count two."""

    requests: int = 0  # answers whose prompt was computed
    prompt_tokens: int = 0  # as `usage` in the answer has them
    cached_tokens: int = 0  # of those, found in the prefix cache
    generated_tokens: int = 0
    queue_seconds: float = 0.0
    load_seconds: float = 0.0  # waiting for adapters
    compute_seconds: float = 0.0  # from the first scheduled chunk of the prompt to the last token
    residency_byte_seconds: float = 0.0  # of the adapter on the device

    def plus(self, other: UsageFigures) -> UsageFigures:
        return UsageFigures(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))


FIGURES = tuple(field.name for field in fields(UsageFigures))
KEY_FIELDS = tuple(field.name for field in fields(UsageKey))

Batch = dict[tuple[int, UsageKey], UsageFigures]  # by the bucket's first Unix second, and key
UsageRow = tuple[int, UsageKey, UsageFigures]


def add_to(batch: Batch, bucket: int, key: UsageKey, figures: UsageFigures) -> None:
    """Count figures in a batch."""
    known = batch.get((bucket, key))
    batch[bucket, key] = figures if known is None else known.plus(figures)
