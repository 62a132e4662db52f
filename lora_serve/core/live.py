"""The view of an engine at work, as `Watch` asks for it. Its parts are those of GET /admin/engine/stream.

Moments are Unix seconds of the engine's machine, durations milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from lora_serve.core.figures import TierStats


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages and of the commands in them; the types of the fields are checked by the decoder."""


class Call(Message, frozen=True):
    """The base of every message that is answered by a `Reply` of the same id."""

    call_id: int  # unique among the calls of one side


def _one_of(*texts: str) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"enum": texts})


RowKind = Annotated[str, _one_of("prefill", "decode", "draft", "pool")]
LiveState = Annotated[str, _one_of("running", "waiting", "loading", "compiling", "preempted", "finished")]
EndReason = Annotated[str, _one_of("stop", "length", "error", "abort")]
# A row of a step: its request, what was done for it, the tokens that were run for it, and those that it got.
LiveRow = tuple[str, RowKind, int, int]


class LiveStep(msgspec.Struct, frozen=True):
    """One step; a number that is missing between two of them belongs to one that was dropped."""

    number: int
    time: float  # of its end
    ms: float
    is_gap: bool  # the engine stood idle before it
    rows: tuple[LiveRow, ...]
    replica: str = ""


class LiveAdapter(msgspec.Struct, frozen=True):
    """One adapter that answers a request."""

    name: str
    version: int
    digest: str
    scale: float


class LiveRequest(msgspec.Struct, frozen=True):
    """One request that waits, runs, or has ended since the last look."""

    id: str
    tenant: str
    adapters: tuple[LiveAdapter, ...]  # none: the base model
    state: LiveState
    num_prompt: int
    num_computed: int
    num_output: int
    num_cached: int
    arrived: float
    first_token_ms: float | None = None
    reason: EndReason | None = None  # of its end
    replica: str = ""


class LiveSlot(msgspec.Struct, frozen=True):
    """One device slot that holds an adapter."""

    index: int
    name: str
    tenant: str  # the adapter's owner
    digest: str
    bytes: int
    num_rows: int
    pinned: bool
    version: int = 0
    also: tuple[str, ...] = ()  # other adapters of the same bytes whose rows run on it
    replica: str = ""


class LiveLoad(msgspec.Struct, frozen=True):
    """An adapter on its way to host memory."""

    digest: str
    tenant: str  # its owner
    name: str = ""


class LiveMove(msgspec.Struct, frozen=True):
    """An adapter that came to a tier, or left one: then it went to "none"."""

    digest: str
    name: str  # empty, as is its owner: not known any more
    tenant: str
    source: str = msgspec.field(name="from")
    to: str
    ms: float
    replica: str = ""


class LiveTier(msgspec.Struct, frozen=True):
    """One tier of adapters; None: not known here."""

    bytes: int | None
    budget: int  # 0: no limit
    items: int | None
    hits: int
    misses: int
    loads: int
    evictions: int

    @classmethod
    def of(cls, tier: TierStats) -> LiveTier:
        """The figures of a tier that are shown live."""
        return cls(
            tier.num_bytes, tier.budget_bytes, tier.num_items, tier.hits, tier.misses, tier.loads, tier.evictions
        )

    def plus(self, other: LiveTier) -> LiveTier:
        """The figures of both; unknown is what one of them does not know."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return LiveTier(*(None if None in pair else sum(pair) for pair in pairs))  # type: ignore[arg-type]


class LiveCount(msgspec.Struct, frozen=True):
    """A tenant's requests."""

    waiting: int
    running: int


class LiveLimits(msgspec.Struct, frozen=True):
    """The batcher's limits in force, and why."""

    max_num_seqs: int
    max_num_batched_tokens: int
    window_ms: float
    reason: str


class LiveTargets(msgspec.Struct, frozen=True):
    """The admin's targets; None: none is set."""

    first_token_ms: float | None
    inter_token_ms: float | None


class LiveSettings(msgspec.Struct, frozen=True):
    """The parts of a look that seldom change."""

    limits: LiveLimits
    targets: LiveTargets
    max_num_seqs: int  # as the admin set it
    block_size: int  # tokens of a KV block
    tiers: Mapping[str, LiveTier]


class EngineView(Message, frozen=True):
    """The engine between two steps, and what it did since the last view."""

    mark: int  # `since` of the next one
    steps: tuple[LiveStep, ...] = ()
    requests: tuple[LiveRequest, ...] = ()  # all that run, and the first of those that wait
    ended: tuple[LiveRequest, ...] = ()
    moves: tuple[LiveMove, ...] = ()
    queue: Mapping[str, LiveCount] = {}  # by tenant
    slots: tuple[LiveSlot, ...] = ()
    max_loras: int = 0
    loads: tuple[LiveLoad, ...] = ()
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_known_blocks: int = 0  # whose content can be found again, in use or free
    num_preemptions: int = 0
    settings: LiveSettings | None = None  # None: they were not asked for
    replica: str = ""  # whose view it is, in a fleet


def name_replica(view: EngineView, replica: str) -> EngineView:
    """The view as that of a fleet's replica: everything that is shown of it names the replica."""
    shown = {
        name: tuple(msgspec.structs.replace(item, replica=replica) for item in getattr(view, name))
        for name in ("steps", "requests", "ended", "moves", "slots")
    }
    return msgspec.structs.replace(view, replica=replica, **shown)
