"""The metered figures, which only grow, and the keys that they are summed by."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class UsageKey:
    """The tenant, key and adapter of a use. Names and versions of several adapters together are joined by "+"."""

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


def coarser(batch: Batch, max_rows: int) -> Batch:
    """The same sums in fewer rows: those of an hour as one, or of a day; then without the API keys, then without the
    adapters' versions, and at last all of a tenant. Its tokens and seconds stay its own, whatever it comes to.
    """
    hour, day = 3600, 86_400
    for seconds, rename in (
        (hour, lambda key: key),
        (day, lambda key: key),
        (day, lambda key: replace(key, key="")),
        (day, lambda key: replace(key, key="", version="", digest="")),
        (day, lambda key: UsageKey(key.tenant, "", "", "")),
    ):
        made: Batch = {}
        for (bucket, key), figures in batch.items():
            add_to(made, bucket - bucket % seconds, rename(key), figures)
        batch = made
        if len(batch) <= max_rows:
            break
    return batch
