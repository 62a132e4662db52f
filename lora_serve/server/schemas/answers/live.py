"""Events of GET /admin/engine/stream: `console/live/frames.py` and `core/live.py`, as clients see them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from lora_serve.console.live import frames
from lora_serve.core import live
from lora_serve.server.schemas.answers.base import Answer, with_fields_of

LiveRow = tuple[str, Literal["prefill", "decode", "draft", "pool"], int, int]


class StreamTargets(Answer):
    """Milliseconds; null: none is set."""

    first_token_ms: float | None
    inter_token_ms: float | None


@with_fields_of(frames.Hello, engine=Literal["thread", "process", "ray"], targets=StreamTargets)
class StreamHello(Answer):
    """The first event, `hello`: what does not change."""


class StreamStep(Answer):
    """One step. A row: its request, what was done for it, the tokens run for it, and those that it got. Without `rows`:
    those of the replica's step before, in the same frame.
    """

    replica: str
    number: int
    time: float
    ms: float
    is_gap: bool
    rows: list[LiveRow] | None = None


@with_fields_of(live.LiveAdapter)
class StreamAdapter(Answer):
    pass


@with_fields_of(
    live.LiveRequest,
    adapters=list[StreamAdapter],
    state=Literal["running", "waiting", "loading", "compiling", "preempted", "finished"],
    reason=Literal["stop", "length", "error", "abort"] | None,
)
class StreamRequest(Answer):
    """One request; `adapters` is empty for the base model, `arrived` in Unix seconds."""

    id: str
    replica: str


class StreamQueue(Answer):
    waiting: int
    running: int


@with_fields_of(live.LiveSlot)
class StreamSlot(Answer):
    replica: str


@with_fields_of(live.LiveMove, source=Annotated[str, Field(alias="from")])
class StreamMove(Answer):
    """An adapter that came to a tier, or left one: then `to` is "none"."""

    replica: str


@with_fields_of(live.LiveTier)
class StreamTier(Answer):
    """Null: not known here; a budget of 0 is no limit."""


@with_fields_of(frames.Blocks)
class StreamBlocks(Answer):
    pass


class StreamTokens(Answer):
    prompt: int
    output: int


class StreamPercentiles(Answer):
    p50: float | None
    p95: float | None


class StreamLatency(Answer):
    first_token_ms: StreamPercentiles
    inter_token_ms: StreamPercentiles


@with_fields_of(live.LiveLimits)
class StreamLimits(Answer):
    pass


class StreamFrame(Answer):
    """An event `frame`. What is left out is not for this viewer; `tiers` come once a second."""

    time: float
    number: int
    steps: list[StreamStep]
    requests: list[StreamRequest]
    num_waiting: int
    num_running: int
    queue: dict[str, StreamQueue]
    slots: list[StreamSlot]
    max_loras: int
    loading: list[str]
    moves: list[StreamMove]
    tokens_per_second: StreamTokens
    latency: StreamLatency
    tiers: dict[str, StreamTier] = {}
    blocks: StreamBlocks | None = None
    limits: StreamLimits | None = None
    preemptions: int | None = None
    restarts: int | None = None


class StreamBye(Answer):
    """The last event, `bye`."""

    reason: str


class LiveEvent(RootModel[StreamHello | StreamFrame | StreamBye]):
    """One event of the stream."""
