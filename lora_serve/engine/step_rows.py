"""The rows of the step that is being composed, and the tokens that are left for others."""

from __future__ import annotations

from lora_serve.core.batch import Row


class StepRows:
    """`budget`: tokens that still fit; below 0 after a row that is too long for any step and runs alone."""

    def __init__(self, max_tokens: int, now: float) -> None:
        self.budget = max_tokens
        self.now = now  # seconds of time.monotonic()
        self._rows: dict[int, tuple[Row, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row, num_tokens: int) -> None:
        """`num_tokens`: what it takes of the budget, padding included."""
        self._rows[row.sequence_id] = (row, num_tokens)
        self.budget -= num_tokens

    def drop(self, sequence_id: int) -> None:
        """Its sequence was preempted; it need not have a row."""
        _, num_tokens = self._rows.pop(sequence_id, (None, 0))
        self.budget += num_tokens

    def rows(self) -> tuple[Row, ...]:
        return tuple(row for row, _ in self._rows.values())
