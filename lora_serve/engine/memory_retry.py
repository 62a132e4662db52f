"""Runs a step that the device has no memory for in parts, one after the other.

Running tokens again is harmless: they write the same K and V to the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lora_serve.core.batch import Batch, BlockMoves, Row, RowOutput
from lora_serve.core.errors import DeviceMemoryError

Run = Callable[[Batch], list[RowOutput]]


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
