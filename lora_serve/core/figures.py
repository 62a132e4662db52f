"""Figures of several engines as those of one, by what the types of their fields say.

A class of figures is a frozen dataclass. Numbers are added, what is held is put together, mappings are merged key by
key and figures within figures field by field, unless the field's type is `Annotated` with a rule of its own. Nothing is
divided: means and shares are worked out by what shows them. Below them are the figures of the tiers of adapters, for
commands that only look at a store and need no settings.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MetricName:
    """A figure's name and help in /metrics."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class MergeBy:
    """The rule of a figure, for two engines that both have one."""

    values: Callable[[Any, Any], object]


@dataclass(frozen=True, slots=True)
class MergeOwners:
    """Likewise where more counts than the two values: of the figures that they belong to, and the field's name."""

    owners: Callable[[Any, Any, str], object]


def united(one: Iterable[T], other: Iterable[T]) -> tuple[T, ...]:
    """All of both, each once."""
    return tuple(dict.fromkeys((*one, *other)))


def added_by_place(one: Iterable[int], other: Iterable[int]) -> tuple[int, ...]:
    """The sum of the first ones, of the second ones, and so on."""
    return tuple(first + second for first, second in zip_longest(one, other, fillvalue=0))


COUNTS = object()  # from the engine's start on: a counter, which must not fall when the engine is lost
HELD = object()  # may be unknown, but is 0 when the engine is lost
Count = Annotated[int, COUNTS]
Seconds = Annotated[float, COUNTS]  # summed
Names = Annotated[tuple[str, ...], MergeBy(united)]


@cache
def marks_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """The names of a class's figures, and what their types say of each."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields(kind)}


def added(one: Any, other: Any) -> Any:
    """Figures of two engines, or a value of both, as those of one."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Mapping):
        return {**one, **{key: added(one[key], value) if key in one else value for key, value in other.items()}}
    if not is_dataclass(type(one)):
        return one + other
    kind: type = type(one)
    return replace(one, **{name: _merged(one, other, name, marks) for name, marks in marks_of(kind).items()})


def _merged(one: Any, other: Any, name: str, marks: tuple[Any, ...]) -> Any:
    first, second = getattr(one, name), getattr(other, name)
    for mark in marks:
        if isinstance(mark, MergeOwners):
            return mark.owners(one, other, name)
        if isinstance(mark, MergeBy) and first is not None and second is not None:
            return mark.values(first, second)
    return added(first, second)


def counters_of(figures: Any) -> Any:
    """The figures that count from the engine's start on, without what it holds and does now."""
    if isinstance(figures, Mapping):
        return {key: counters_of(value) for key, value in figures.items()}
    if not is_dataclass(type(figures)):
        return figures
    kind: type = type(figures)
    marks = marks_of(kind)
    return replace(
        figures,
        **{
            field.name: counters_of(getattr(figures, field.name))
            if COUNTS in marks[field.name]
            else _nothing(field, marks[field.name])
            for field in fields(figures)
        },
    )


def _nothing(field: Field[Any], marks: tuple[Any, ...]) -> Any:
    """The value that changes nothing that it is added to."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return 0 if field.default is MISSING or HELD in marks else field.default


class EvictionReason(enum.StrEnum):
    """The reason for which an adapter left a tier."""

    CAPACITY = "capacity"  # another adapter needed its place
    ADMIN = "admin"  # asked for by the admin API
    DELETED = "deleted"  # nothing names it any more
    SHRUNK = "shrunk"  # the tier's budget, or its owner's maximum, was made smaller
    CORRUPT = "corrupt"  # its bytes were not what its digest says


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """One load of an adapter's weights, in seconds, waiting for a thread not counted."""

    tier: str  # where the bytes came from: "disk", "redis", ...; "none": they were made here
    fetch: float = 0.0  # files onto this machine, bytes into memory
    verify: float = 0.0  # their digests
    parse: float = 0.0  # to tensors, checked against the base
    fold: float = 0.0  # the base's part worked in
    copy: float = 0.0  # into a device slot, on the engine's thread


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A fetched adapter, and where the time went."""

    value: T
    times: LoadTimes
    extra_bytes: int = 0  # of host memory that it takes beyond those of its adapter


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier ("device", "host", "disk" or "redis") of the adapter cache."""

    hits: Annotated[Count, MetricName("lora_serve_adapter_hits", "Adapter hits per tier.")]
    misses: Annotated[Count, MetricName("lora_serve_adapter_misses", "Adapter misses per tier.")]
    loads: Annotated[Count, MetricName("lora_serve_adapter_loads", "Adapter loads per tier.")]
    evictions: Count
    load_seconds: Seconds
    # Resident now; None: not known here, as other replicas write to the tier.
    num_bytes: Annotated[int | None, MetricName("lora_serve_adapter_bytes", "Bytes of adapters in the tier.")]
    # 0: no limit in bytes.
    budget_bytes: Annotated[
        int, MetricName("lora_serve_adapter_budget_bytes", "Bytes that the tier may hold; 0: no limit.")
    ]
    # Resident now; None: not known here.
    num_items: Annotated[int | None, HELD, MetricName("lora_serve_adapter_count", "Adapters in the tier.")] = None
    # They add up to `evictions`.
    eviction_reasons: Annotated[Mapping[EvictionReason, int], COUNTS] = field(default_factory=dict)
