"""The seam to the model: what a step asks of it."""

from __future__ import annotations

from typing import Any, Protocol

from lora_serve.core.batch import Batch, BlockMoves, RowAdapter, RowOutput, SlotRef
from lora_serve.core.messages import SmokeTestResult


class Runner(Protocol):
    """The model: `model/runner/model_runner.py`, or a fake in tests."""

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
