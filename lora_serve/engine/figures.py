"""The engine between two steps: its figures since the start, and its present state for a live view."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from lora_serve.core import live
from lora_serve.core.batch import Batch
from lora_serve.core.constraints import Constraints
from lora_serve.core.messages import Watch
from lora_serve.core.stats import STEP_TOKENS, BatchInfo, ConstraintStats, EngineStats, GraphStats
from lora_serve.engine.blocks import BlockTables
from lora_serve.engine.recorder import Recorder
from lora_serve.engine.residency import AdapterResidency
from lora_serve.engine.scheduling.scheduler import Scheduler
from lora_serve.engine.scheduling.step_rows import MemoryGuard
from lora_serve.engine.sequence import Sequence

MAX_WAITING = 128  # requests that are shown, of all tenants and of each one that is watched
_NUM_RECENT_BATCHES = 64


@dataclass(eq=False)
class EngineFigures:
    """Counts steps, and looks at everything else where it is kept."""

    _scheduler: Scheduler
    _residency: AdapterResidency[Any]
    _blocks: BlockTables
    _memory: MemoryGuard
    _constraints: Constraints | None
    _recorder: Recorder
    _graphs: Callable[[], GraphStats]
    num_steps: int = 0
    _step_seconds: float = 0.0
    _num_step_tokens: int = 0
    _steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    _recent: deque[BatchInfo] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT_BATCHES))

    def count_step(self, batch: Batch, seconds: float) -> None:
        self._recent.append(BatchInfo(len(batch.rows), batch.num_tokens, batch.num_adapters, seconds))
        self.num_steps += 1
        self._steps_by_tokens[bisect_left(STEP_TOKENS, batch.num_tokens)] += 1
        self._num_step_tokens += batch.num_tokens
        self._step_seconds += seconds

    def stats(self) -> EngineStats:
        scheduler, residency, slots = self._scheduler, self._residency, tuple(self._residency.slots.infos())
        waiting = {ref.name for sequence in scheduler.waiting for ref in sequence.refs}
        return EngineStats(
            pid=os.getpid(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            running_adapters=tuple(sorted({slot.name for slot in slots})),
            waiting_adapters=tuple(sorted(waiting)),
            max_loras=residency.slots.num_slots,
            num_blocks=self._blocks.kinds[0].num_blocks,
            num_free_blocks=self._blocks.num_unused,
            block_size=self._blocks.block_size,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.prefix_cache.num_queries,
            num_prefix_hits=scheduler.prefix_cache.num_hits,
            slots=slots,
            host_digests=residency.host.digests,
            loading_digests=tuple(ref.digest for ref in residency.loading),
            tiers=residency.tiers(),
            adapters=residency.counters(),
            recent_batches=tuple(self._recent),
            num_steps=self.num_steps,
            step_seconds=self._step_seconds,
            steps_by_tokens=tuple(self._steps_by_tokens),
            num_step_tokens=self._num_step_tokens,
            batcher=scheduler.batcher.stats(scheduler.running),
            memory=self._memory.stats(),
            swap=scheduler.swapping.stats(),
            num_constrained=sum(sequence.constraint is not None for sequence in scheduler.running),
            num_forced=scheduler.outputs.num_forced,
            constraints=ConstraintStats() if self._constraints is None else self._constraints.stats(),
            graphs=self._graphs(),
            speculation=scheduler.drafting.stats({slot.digest: slot.name for slot in slots}),
            num_hung_loads=residency.num_hung_loads,
            num_waiting_tokens=sum(
                max(0, s.num_prompt - s.num_computed) for s in (*scheduler.running, *scheduler.waiting)
            ),
            num_running_tokens=sum(sequence.num_computed for sequence in scheduler.running),
        )

    def view(self, asked: Watch, now: float) -> live.EngineView:
        """The present state, and the notes since the asker's last view."""
        scheduler, residency, recorder, blocks = self._scheduler, self._residency, self._recorder, self._blocks
        recorder.watched(now)
        since = asked.since if asked.since <= recorder.mark else 0  # it watched an engine that is no more
        running = tuple(recorder.request(sequence, "running") for sequence in scheduler.running)
        waiting = tuple(
            recorder.request(sequence, _state(sequence, residency))
            for sequence in _first_waiting(scheduler, asked.tenants, now)
        )
        steps, ended, moves = recorder.notes(since)
        return live.EngineView(
            mark=recorder.mark,
            slots=tuple(_slots(residency, recorder)),
            requests=running + waiting,
            steps=steps,
            ended=ended,
            moves=moves,
            queue=_queue(scheduler),
            max_loras=residency.slots.num_slots,
            loads=tuple(live.LiveLoad(ref.digest, ref.tenant, ref.name) for ref in residency.loading),
            num_blocks=blocks.kinds[0].num_blocks,
            num_free_blocks=blocks.num_unused,
            num_known_blocks=blocks.kinds[0].num_known,
            num_preemptions=scheduler.num_preemptions,
            settings=_settings(scheduler, residency, blocks.block_size) if asked.in_full else None,
        )


def _first_waiting(scheduler: Scheduler, tenants: Collection[str], now: float) -> list[Sequence]:
    """The first of all; beside them the first of each of the tenants, and all that were preempted, as steps may name
    them.
    """
    found = list(islice(scheduler.waiting_in_order(now), MAX_WAITING))
    if len(found) == len(scheduler.waiting):
        return found
    known, left = set(found), dict.fromkeys(tenants, MAX_WAITING)
    for sequence in scheduler.waiting:
        tenant = sequence.request.tenant
        if sequence.has_run or left.get(tenant, 0) > 0:
            left[tenant] = left.get(tenant, 0) - 1
            if sequence not in known:
                found.append(sequence)
    return found


def _state(sequence: Sequence, residency: AdapterResidency[Any]) -> str:
    if sequence.has_run:
        return "preempted"
    if sequence.is_compiling:
        return "compiling"
    return "waiting" if all(residency.is_here(use.ref.digest) for use in sequence.adapters) else "loading"


def _queue(scheduler: Scheduler) -> dict[str, live.LiveCount]:
    waiting = Counter(sequence.request.tenant for sequence in scheduler.waiting)
    running = Counter(sequence.request.tenant for sequence in scheduler.running)
    return {tenant: live.LiveCount(waiting[tenant], running[tenant]) for tenant in chain(running, waiting)}


def _slots(residency: AdapterResidency[Any], recorder: Recorder) -> list[live.LiveSlot]:
    found = []
    for slot, ref, num_rows, is_pinned in residency.slots.residents():
        recorder.met(ref)
        size, version = ref.num_bytes, ref.version
        found.append(live.LiveSlot(slot.index, ref.name, ref.tenant, ref.digest, size, num_rows, is_pinned, version))
    return sorted(found, key=lambda slot: slot.index)


def _settings(scheduler: Scheduler, residency: AdapterResidency[Any], block_size: int) -> live.LiveSettings:
    stats = scheduler.batcher.stats(scheduler.running)
    limits = stats.limits
    return live.LiveSettings(
        live.LiveLimits(stats.max_rows, stats.max_tokens, round(1000 * stats.window, 3), stats.reason),
        live.LiveTargets(_ms(limits.ttft_target), _ms(limits.itl_target)), limits.max_num_seqs, block_size,
        {name: live.LiveTier.of(tier) for name, tier in residency.tiers().items()},
    )  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
