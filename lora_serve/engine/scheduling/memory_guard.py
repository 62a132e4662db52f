"""The device's memory: steps are checked before they are composed, and run in parts if memory is short all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, BlockMoves, Row, RowOutput
from lora_serve.core.errors import DeviceMemoryError
from lora_serve.core.memory import MemoryLoad, MemoryPlan
from lora_serve.core.stats import MemoryStats
from lora_serve.engine.adapters.slots import SlotTable

_STEPS_BEFORE_GROWTH = 16  # successful ones before a limit lowered by lack of memory is raised again
_GROWTH = 1.25
Run = Callable[[Batch], list[RowOutput]]


@dataclass(eq=False)
class MemoryGuard:
    """Keeps weights + KV pool + resident adapters + activations(step) <= limit.

    Memory can be short all the same, through fragmentation or other programs: then steps have half as many tokens as
    the one that failed, and a quarter more after every few successful ones, until they are as large again.
    """

    _plan: MemoryPlan
    _slots: SlotTable
    _max_tokens: int | None = None
    _failed_tokens: int = 0
    _num_well: int = 0
    _num_out_of_memory: int = 0
    _last: int = 0
    _largest: int = 0

    def max_tokens(self, configured: int) -> int:
        """The most tokens of the next step."""
        return configured if self._max_tokens is None else min(configured, self._max_tokens)

    def fits(self, load: MemoryLoad, adapters: Iterable[AdapterRef]) -> bool:
        """True if a step may be composed that makes these `adapters` resident, if they are not yet."""
        if self._plan.limit is None:
            return True
        newcomers = sum(adapter.num_bytes for adapter in adapters if adapter.digest not in self._slots)
        return self._taken() + newcomers + self._plan.activations.num_bytes(load) <= self._plan.limit

    def composed(self, load: MemoryLoad) -> None:
        """Notes the step that runs next."""
        self._last = self._plan.activations.num_bytes(load)
        self._largest = max(self._largest, self._taken() + self._last)

    def ran_out(self, num_tokens: int) -> None:
        """Notes that the device had no memory for a step of so many tokens."""
        self._num_out_of_memory += 1
        self._num_well = 0
        self._failed_tokens = max(self._failed_tokens, num_tokens)
        self._max_tokens = max(1, num_tokens // 2)

    def ran_well(self) -> None:
        """Notes a step that was computed in one piece."""
        if self._max_tokens is None:
            return
        self._num_well += 1
        if self._num_well % _STEPS_BEFORE_GROWTH == 0:
            self._max_tokens = int(self._max_tokens * _GROWTH) + 1
        if self._max_tokens > self._failed_tokens:
            self._max_tokens, self._failed_tokens = None, 0

    def stats(self) -> MemoryStats:
        plan = self._plan
        return MemoryStats(
            plan.limit,
            plan.weight_bytes,
            plan.kv_bytes,
            self._slots.num_bytes,
            self._last,
            self._largest,
            plan.measured_peak(),
            self._num_out_of_memory,
            self._max_tokens,
        )

    def _taken(self) -> int:
        return self._plan.weight_bytes + self._plan.kv_bytes + self._slots.num_bytes


def run_in_parts(run: Run, batch: Batch) -> list[RowOutput]:
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
        return run_in_parts(run, Batch((row.without_draft(),), batch.fresh_blocks))
    if len(row.token_ids) == 1 or row.pool is not None:
        return [RowOutput(row.sequence_id, None, error=failure)]
    first, second = halves_of_row(row)
    before = run_in_parts(run, Batch((first,), batch.fresh_blocks))[0]
    if before.error is not None:
        return [before]
    after = run_in_parts(run, Batch((second,), ()))[0]
    return [replace(after, prompt_logprobs=before.prompt_logprobs + after.prompt_logprobs)]


def halves_of_rows(batch: Batch) -> tuple[Batch, Batch]:
    """Two batches of half the rows; the first zeroes the fresh blocks of both, and moves were made before."""
    middle = len(batch.rows) // 2
    first, second = batch.rows[:middle], batch.rows[middle:]
    return Batch(first, batch.fresh_blocks, BlockMoves()), Batch(second, (), BlockMoves())


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
