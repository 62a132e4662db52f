"""A step on the device: slots, moves of blocks, masks, the forward pass; in parts where memory is short."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lora_serve.core.batch import Batch, BlockMoves, Row, RowAdapter, RowOutput, SlotRef
from lora_serve.core.constraints import Constraints
from lora_serve.core.errors import AdapterUnavailableError, DeviceMemoryError, InternalError, LoraServeError
from lora_serve.core.messages import SmokeTestResult
from lora_serve.engine.flights import Flights
from lora_serve.engine.residency import AdapterResidency
from lora_serve.engine.scheduling.step_rows import MemoryGuard
from lora_serve.engine.swapping import Swapping

_log = logging.getLogger(__name__)
RunBatch = Callable[[Batch], list[RowOutput]]


class Runner(Protocol):
    """The seam to the model (`model/runner/model_runner.py`, or a fake in tests): what a step asks of it."""

    def load_slot(self, slot: SlotRef, adapter: Any) -> None:
        """Puts an adapter's weights into a device slot."""

    def clear_slot(self, index: int) -> None:
        """Frees a device slot's weights."""

    def run(self, batch: Batch) -> list[RowOutput]:
        """Runs one forward pass; one output per row, in order. The batch's moves were made before.

        Raises DeviceMemoryError if the device has no memory for it.
        """

    def move_blocks(self, moves: BlockMoves) -> None:
        """Copies KV blocks to host memory, then others back; done when it returns."""

    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        """Runs a prompt with the base model and with the adapter in a slot; no block is held afterwards."""


@dataclass(eq=False)
class Execution:
    """Makes the runner do what was decided. An error ends no more than the rows that it concerns."""

    runner: Runner
    _residency: AdapterResidency[Any]
    _swapping: Swapping
    _memory: MemoryGuard
    _constraints: Constraints | None
    _clock: Callable[[], float]
    flights: Flights

    def load_slots(self) -> dict[str, LoraServeError]:
        """Makes the slot changes that are due; returns the errors of failed copies by digest."""
        failed: dict[str, LoraServeError] = {}
        for slot, adapter in self._residency.take_changes():
            if adapter is None:
                self.runner.clear_slot(slot.index)
                continue
            start = self._clock()
            try:
                self.runner.load_slot(slot, adapter)
                self._residency.copied(slot, self._clock() - start)
            except Exception:  # its rows are refused by the pool's check; the others run
                _log.exception("slot %d could not be loaded with %s", slot.index, slot.digest)
                self._residency.not_copied(slot)
                failed[slot.digest] = AdapterUnavailableError("The adapter cannot be copied to the device now.")
        return failed

    def clear_slots(self) -> None:
        """Clears the device's slots, before another engine uses the runner."""
        self.flights.abandon()
        for index in range(self._residency.slots.num_indices):
            self.runner.clear_slot(index)

    def start_masks(self, batch: Batch) -> None:
        """Begins to work out what may come next in the rows that obey a grammar, beside the forward pass."""
        if self._constraints is not None:
            samples = [row.sample for row in batch.rows if row.sample is not None and row.sample.allowed is not None]
            wanted = [(sample.allowed, *sample.allowed_after) for sample in samples]
            self._constraints.start([allowed for row in wanted for allowed in row if allowed is not None])

    def move(self, moves: BlockMoves) -> float:
        """Copies blocks to and from host memory; returns the seconds that it took."""
        if not moves:
            return 0.0
        start = time.perf_counter()
        self.runner.move_blocks(moves)
        seconds = time.perf_counter() - start
        self._swapping.observe(len(moves), seconds)
        return seconds

    def run(self, batch: Batch) -> list[RowOutput]:
        """Runs the forward pass, in parts if memory is short. If it raises, every row runs alone, so that only the row
        at fault ends.

        Running a row again is harmless: it writes the same K and V to the same places.
        """
        try:
            return run_in_parts(self._attempt, batch)
        except Exception:
            _log.exception("a batch of %d rows failed; its rows run alone", len(batch.rows))
        return [
            self._run_alone(batch.first_part((row,)) if i == 0 else Batch((row,), ()))
            for i, row in enumerate(batch.rows)
        ]

    def _run_alone(self, batch: Batch) -> RowOutput:
        try:
            return run_in_parts(self._attempt, batch)[0]
        except Exception:
            _log.exception("a row failed alone")
        return RowOutput(batch.rows[0].sequence_id, None, error=InternalError("The request could not be computed."))

    def _attempt(self, batch: Batch) -> list[RowOutput]:
        try:
            outputs = self.runner.run(batch)
        except DeviceMemoryError as error:
            self._memory.ran_out(batch.num_tokens)
            _log.warning("%d rows of %d tokens run in parts: %s", len(batch.rows), batch.num_tokens, error)
            raise
        self._memory.ran_well()
        return outputs


def run_in_parts(run: RunBatch, batch: Batch) -> list[RowOutput]:
    """Calls `run`, in halves of the rows, then of a row's tokens, wherever it raises DeviceMemoryError.

    Returns one output per row. A row that does not fit even alone and token by token gets the error; so does a pooling
    row, as it cannot be cut. Raises whatever else `run` raises.
    """
    try:
        return run(batch)
    except DeviceMemoryError as error:
        failure = error
    if len(batch.rows) > 1:
        return [output for half in halves_of_rows(batch) for output in run_in_parts(run, half)]
    (row,) = batch.rows
    if row.num_draft:
        return run_in_parts(run, batch.first_part((row.without_draft(),)))
    if len(row.token_ids) == 1 or row.pool is not None:
        return [RowOutput(row.sequence_id, None, error=failure)]
    first, second = halves_of_row(row)
    before = run_in_parts(run, batch.first_part((first,)))[0]
    if before.error is not None:
        return [before]
    after = run_in_parts(run, Batch((second,), ()))[0]
    return [replace(after, prompt_logprobs=before.prompt_logprobs + after.prompt_logprobs)]


def halves_of_rows(batch: Batch) -> tuple[Batch, Batch]:
    """Two batches of half the rows; the first zeroes the fresh blocks of both, and moves were made before."""
    middle = len(batch.rows) // 2
    first, second = batch.rows[:middle], batch.rows[middle:]
    return batch.first_part(first), Batch(second, ())


def halves_of_row(row: Row) -> tuple[Row, Row]:
    """Two chunks of a row of several tokens; only the second one samples."""
    middle = len(row.token_ids) // 2
    targets = row.prompt_targets
    first = replace(
        row, token_ids=row.token_ids[:middle], sample=None, prompt_targets=None if targets is None else targets[:middle]
    )
    second = replace(
        row,
        token_ids=row.token_ids[middle:],
        start=row.start + middle,
        prompt_targets=None if targets is None else targets[middle:],
    )
    return first, second
