"""The seam between a registration and the sources of adapter files."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lora_serve.adapters.sources.intake import Progress
from lora_serve.core.errors import InvalidRequestError


class AdapterSource(Protocol):
    """One kind of source. Called on worker threads, several at once; has no state of a transfer."""

    def fetch(self, source: str, target: Path, limit: int, progress: Progress) -> str:
        """Bring adapter_config.json, adapter_model.safetensors and tokenizer.json, and nothing else, into `target`.

        `target`: an empty private folder, beside which scratch folders may be made; after an error the caller removes
        it. `limit`: bytes in all. An exception of `progress` aborts the transfer. A missing file is left out (or
        InvalidAdapterError); an empty `adapter_model.bin` may stand in its place, for a better error.

        Returns the source for the adapter's card, without credentials. Raises InvalidRequestError (param="source":
        malformed, not found, not allowed), InvalidAdapterError, PayloadTooLargeError, AdapterUnavailableError
        (unreachable, cut short, changed meanwhile), OSError (from writing into `target`).
        """


def refuse(message: str) -> InvalidRequestError:
    """The error for a source that the caller must correct."""
    return InvalidRequestError(message, param="source")
