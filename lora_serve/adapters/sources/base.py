"""The seam between a registration and wherever an adapter's files come from."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lora_serve.adapters.sources.intake import Progress
from lora_serve.core.errors import InvalidRequestError


class AdapterSource(Protocol):
    """One kind of source. Called on worker threads, several at once; holds no state of a transfer."""

    def fetch(self, source: str, target: Path, limit: int, progress: Progress) -> str:
        """Bring adapter_config.json, adapter_model.safetensors and tokenizer.json, and nothing else, into `target`.

        `target`: an empty private folder, whose parent may hold scratch folders beside it; after an error the caller
        removes it. `limit`: bytes in all. What `progress` raises breaks the transfer off. A missing file is left out
        (or InvalidAdapterError); `adapter_model.bin` may be left in its place, empty, so that the refusal says more.

        Returns what the adapter's card says as its source: no credentials. Raises InvalidRequestError
        (param="source": malformed, not there, not allowed), InvalidAdapterError, PayloadTooLargeError,
        AdapterUnavailableError (not now: unreachable, cut short, changed meanwhile), OSError (`target`'s own).
        """


def refuse(message: str) -> InvalidRequestError:
    """The error for a source that the caller must say differently."""
    return InvalidRequestError(message, param="source")
