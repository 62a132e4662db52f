"""Events of GET /admin/engine/stream: `console/live/frames.py` and `core/live.py`, as clients see them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, RootModel

from lora_serve.server.schemas.answers.base import Answer

LiveRow = tuple[str, Literal["prefill", "decode", "draft", "pool"], int, int]


class StreamTargets(Answer):
    """Milliseconds; null: none is set."""

    first_token_ms: float | None
    inter_token_ms: float | None


class StreamHello(Answer):
    """The first event, `hello`: what does not change."""

    version: str
    started: float
    model: str
    rate: float
    scope: str | None
    engine: Literal["thread", "process", "ray"]
    max_num_seqs: int
    block_size: int
    targets: StreamTargets


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


class StreamAdapter(Answer):
    name: str
    version: int
    digest: str
    scale: float


class StreamRequest(Answer):
    """One request; `adapters` is empty for the base model, `arrived` in Unix seconds."""

    id: str
    replica: str
    tenant: str
    adapters: list[StreamAdapter]
    state: Literal["running", "waiting", "loading", "compiling", "preempted", "finished"]
    num_prompt: int
    num_computed: int
    num_output: int
    num_cached: int
    arrived: float
    first_token_ms: float | None
    reason: Literal["stop", "length", "error", "abort"] | None


class StreamQueue(Answer):
    waiting: int
    running: int


class StreamSlot(Answer):
    replica: str
    index: int
    name: str
    tenant: str
    digest: str
    bytes: int
    num_rows: int
    pinned: bool
    version: int
    also: list[str]


class StreamMove(Answer):
    """An adapter that came to a tier, or left one: then `to` is "none"."""

    replica: str
    digest: str
    name: str
    tenant: str
    source: str = Field(alias="from")
    to: str
    ms: float


class StreamTier(Answer):
    """Null: not known here; a budget of 0 is no limit."""

    bytes: int | None
    budget: int
    items: int | None
    hits: int
    misses: int
    loads: int
    evictions: int


class StreamBlocks(Answer):
    total: int
    free: int
    cached: int


class StreamTokens(Answer):
    prompt: int
    output: int


class StreamPercentiles(Answer):
    p50: float | None
    p95: float | None


class StreamLatency(Answer):
    first_token_ms: StreamPercentiles
    inter_token_ms: StreamPercentiles


class StreamLimits(Answer):
    max_num_seqs: int
    max_num_batched_tokens: int
    window_ms: float
    reason: str


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
