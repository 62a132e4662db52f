"""The seam through which a registration tries an adapter on the base model, which this floor does not know."""

from __future__ import annotations

from typing import Protocol

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.commands import ProbeResult


class Trial(Protocol):
    """Called on the registry's thread."""

    def converted(self, saved: SavedAdapter, init: str) -> SavedAdapter:
        """What was trained from the start `init` as a LoRA of the base as it is. Raises InvalidAdapterError."""

    def num_bytes(self, saved: SavedAdapter) -> int:
        """Host memory that the adapter takes once it is ready for the base model. Raises InvalidAdapterError."""

    def probe(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> ProbeResult:
        """What an adapter that is in the store changes in the answers. Raises AdapterUnavailableError."""
