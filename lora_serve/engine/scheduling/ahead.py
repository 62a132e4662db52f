"""The step after one whose results are not here yet: rows that go on, whatever token the device draws for them.

Nothing is decided here that a result could change: no sequence is admitted or preempted, no slot changes, no block
moves. What asks for that waits until the results are here, and so does all that only a host can draw. A row whose
sequence turns out to have ended has run in vain, and so has one that was fed a token which the device could not draw.
Such a row wrote K and V at the position after the last computed one: into a block that was its sequence's own, and
that is not published, as publishing counts what was taken in; a later owner of the block zeroes and writes it behind
that, as all of it is one stream of the device's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lora_serve.core.batch import Batch, BlockMoves, Row, RowOutput
from lora_serve.engine.blocks import BlockTables
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.scheduling.scheduler import Scheduler
from lora_serve.engine.scheduling.step_rows import MemoryGuard, StepRows, row_of
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.step_cost import StepLimits

_TRY_AGAIN = 0.1  # seconds after which all that wait are tried anew, though nothing has happened
_UNKNOWN = 0  # stands for the token that is being drawn


@dataclass(eq=False)
class AheadScheduler:
    """Composes batches that can be launched, and says of which outputs anything is still wanted."""

    _scheduler: Scheduler
    _blocks: BlockTables
    _memory: MemoryGuard
    _policy: Policy

    def may_launch(self, batch: Batch) -> bool:
        """True if the batch's rows need nothing of the host before all of their results are here."""
        return all(row.is_plain for row in batch.rows) and not any(s.draws_widely for s in self._scheduler.running)

    def compose(self, before: Batch, now: float) -> Batch | None:
        """The step after `before`, which is under way; None: its results have to be here first."""
        scheduler, running, waiting = self._scheduler, self._scheduler.running, self._scheduler.waiting
        if not running or scheduler.drafting.is_on or any(sequence.draws_widely for sequence in running):
            return None
        with _assumed(running, before) as fed:
            limits = scheduler.batcher.step_limits(running, len(waiting))
            if waiting and (scheduler.prefetcher.is_due or self._may_admit(limits, now)):
                return None
            rows = StepRows(limits.max_tokens, now, self._memory)
            for sequence, count in rows.planned([s for s in running if not (s.sequence_id in fed and _is_over(s))]):
                if count <= 0:
                    continue
                missing = self._blocks.num_missing(sequence, sequence.num_computed + count)
                before_row = fed.get(sequence.sequence_id)
                if missing > self._blocks.num_free:
                    return None
                self._blocks.add(sequence, missing)
                row = row_of(sequence, count, is_fed=before_row is not None)
                if not row.is_plain or (before_row and before_row.is_long != row.is_long):
                    return None
                rows.add(row, count)
        if not rows:
            return None
        self._memory.composed(rows.load)
        fresh, *windowed = self._blocks.take_fresh()
        return Batch(rows.rows(), fresh, BlockMoves(), *windowed)

    def drop(self, batch: Batch) -> None:
        """Notes that a batch was composed in vain."""
        self._blocks.give_back_fresh(batch)

    def wanted(self, batch: Batch, outputs: Items[RowOutput | None]) -> tuple[Batch | None, list[RowOutput]]:
        """The rows of a batch whose results still count, with their outputs; None: there is no such row."""
        sequences = self._scheduler.running_by_id()
        found: list[tuple[Row, RowOutput]] = []
        for row, output in zip(batch.rows, outputs, strict=True):
            sequence = sequences.get(row.sequence_id)
            if sequence is None or sequence.num_computed != row.start:
                continue
            if output is None:
                sequence.draws_widely = True
            else:
                found.append((row, output))
        if not found:
            return None, []
        rows, kept = zip(*found, strict=True)
        return replace(batch, rows=rows), list(kept)

    def _may_admit(self, limits: StepLimits, now: float) -> bool:
        """True if a sequence that waits might be admitted to the next step, as in `Scheduler.schedule`.

        What each of them found no slot for is a row that ends, and then the prefetcher is due. Time alone changes less,
        as what a policy thinks of those that run.
        """
        if now < self._scheduler.tried_all_at + _TRY_AGAIN:
            return False
        ready = (s for s in self._policy.order(now) if s.ready_at < math.inf or s.fallback is not None)
        first = next(ready, None)
        if first is None:
            return False
        running = self._scheduler.running
        has_place = len(running) < limits.max_rows and self._scheduler.prefix_cache.can_allocate(first)
        return has_place or self._policy.victim(running, first) is not None


def _is_over(sequence: Sequence) -> bool:
    """True if the token that is being drawn is the last one, whichever it is."""
    return sequence.num_steps_left <= 0 or len(sequence.token_ids) >= sequence.ends.max_model_len


@contextmanager
def _assumed(running: Items[Sequence], before: Batch) -> Iterator[Mapping[int, Row]]:
    """Within, the sequences are as they will be after `before`, but that its tokens are unknown. Yields its rows that
    sample by the ids of their sequences.
    """
    rows = {row.sequence_id: row for row in before.rows}
    assumed = [(sequence, rows[sequence.sequence_id]) for sequence in running if sequence.sequence_id in rows]
    fed = {row.sequence_id: row for _, row in assumed if row.sample is not None}
    for sequence, row in assumed:
        assert sequence.num_computed == row.start, "the results before are not taken in"
        sequence.num_computed += len(row.token_ids)
        if row.sample is not None:
            sequence.token_ids.append(_UNKNOWN)
    try:
        yield fed
    finally:
        for sequence, row in assumed:
            sequence.num_computed = row.start
            if row.sample is not None:
                sequence.token_ids.pop()
