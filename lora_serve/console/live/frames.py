"""Events of GET /admin/engine/stream. Each frame is whole in itself: one that is lost costs only its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from lora_serve.core.live import (
    LiveCount,
    LiveLimits,
    LiveMove,
    LiveRequest,
    LiveRow,
    LiveSlot,
    LiveStep,
    LiveTargets,
    LiveTier,
)

KEEP_ALIVE = b": nothing new\n\n"
_encode = msgspec.json.Encoder().encode


class Hello(msgspec.Struct, frozen=True):
    """The first event: what does not change."""

    version: str
    started: float  # Unix seconds; another number: the server was started again
    model: str
    rate: float
    scope: str | None  # the tenant of which alone something is shown; None: all
    engine: str
    max_num_seqs: int
    block_size: int
    targets: LiveTargets


class Blocks(msgspec.Struct, frozen=True):
    """KV blocks; `cached`: whose content can be found again, in use or free."""

    total: int
    free: int
    cached: int


class TokenRate(msgspec.Struct, frozen=True):
    """Tokens of the last second."""

    prompt: int
    output: int


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds; None: nothing was measured lately."""

    p50: float | None
    p95: float | None


class Latency(msgspec.Struct, frozen=True):
    """Times as callers saw them, of lately."""

    first_token_ms: Percentiles
    inter_token_ms: Percentiles


class Step(msgspec.Struct, frozen=True):
    """See `LiveStep`. UNSET: the rows are those of the replica's step before this one, in the same frame."""

    number: int
    time: float
    ms: float
    is_gap: bool
    replica: str
    rows: tuple[LiveRow, ...] | UnsetType = UNSET


class Frame(msgspec.Struct, frozen=True):
    """The engine as it is, and what it did since the frame before. What is not there is not for this viewer."""

    time: float
    number: int
    steps: Sequence[Step]
    requests: Sequence[LiveRequest]
    num_waiting: int
    num_running: int
    queue: Mapping[str, LiveCount]
    slots: Sequence[LiveSlot]
    max_loras: int
    loading: Sequence[str]
    moves: Sequence[LiveMove]
    tokens_per_second: TokenRate
    latency: Latency
    tiers: Mapping[str, LiveTier] | UnsetType = UNSET  # once a second
    blocks: Blocks | UnsetType = UNSET
    limits: LiveLimits | UnsetType = UNSET
    preemptions: int | UnsetType = UNSET
    restarts: int | UnsetType = UNSET


class Bye(msgspec.Struct, frozen=True):
    """The last event: why the stream ends."""

    reason: str


def steps_of_frame(steps: Iterable[LiveStep]) -> tuple[Step, ...]:
    """The steps of one frame. Rows that decode are the same for hundreds of steps: they are told once."""
    last: dict[str, tuple[LiveRow, ...]] = {}
    told = []
    for step in steps:
        rows = UNSET if last.get(step.replica) == step.rows else step.rows
        last[step.replica] = step.rows
        told.append(Step(step.number, step.time, step.ms, step.is_gap, step.replica, rows))
    return tuple(told)


def event(data: Hello | Frame | Bye) -> bytes:
    """A server-sent event, named after its kind."""
    return b"event: %b\ndata: %b\n\n" % (type(data).__name__.lower().encode(), _encode(data))
