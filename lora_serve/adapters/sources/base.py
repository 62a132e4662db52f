"""The seam between a registration and the sources of adapter files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from lora_serve.adapters.checkpoint.content import (
    CONFIG_NAME,
    MAX_SIDE_BYTES,
    SIDE_NAMES,
    WEIGHTS_NAME,
)
from lora_serve.core.errors import InvalidRequestError, PayloadTooLargeError

NAMES = (CONFIG_NAME, WEIGHTS_NAME)
PICKLE_NAME = "adapter_model.bin"
CHUNK_BYTES = 2**20
Progress = Callable[[int], None]  # gets the bytes so far; an exception aborts the transfer


def no_progress(num_bytes: int) -> None:
    """Ignores the progress."""


class Intake:
    """Writes an adapter's files into `folder`, `limit` bytes in all at most."""

    def __init__(self, folder: Path, limit: int, progress: Progress = no_progress) -> None:
        self._folder = folder
        self._limit = limit
        self._progress = progress
        self._num_bytes = 0

    def check_size(self, num_bytes: int) -> None:
        """Check a size that is known before the first byte moves. Raises PayloadTooLargeError."""
        if num_bytes > self._limit - self._num_bytes:
            raise PayloadTooLargeError(f"The adapter's files exceed --max-upload-size ({self._limit} bytes).")

    def take(self, name: str, chunks: Iterable[bytes]) -> int:
        """Write `name`, one of NAMES; returns its bytes. Raises PayloadTooLargeError, OSError, what `chunks` raises."""
        assert name in NAMES, name
        return self.write(self._folder / name, chunks)

    def take_side(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write one of SIDE_NAMES; one that is too large is left empty: only adapters that need it are refused."""
        assert name in SIDE_NAMES, name
        path, before = self._folder / name, self._num_bytes
        try:
            self.write(path, _at_most(chunks, MAX_SIDE_BYTES[name], name))
        except PayloadTooLargeError:
            self._num_bytes = before
            self.empty(name)

    def empty(self, name: str) -> None:
        """Write `name` without content: only its presence counts (artifact.check_files, added_tokens)."""
        (self._folder / name).write_bytes(b"")

    def beat(self) -> None:
        """Report progress although no byte has arrived here yet, so that the transfer can be aborted."""
        self._progress(self._num_bytes)

    def write(self, path: Path, chunks: Iterable[bytes]) -> int:
        """Write any private file, for instance an archive; returns its bytes. Raises as `take` does."""
        before = self._num_bytes
        with path.open("wb") as file:
            for chunk in chunks:
                self.check_size(len(chunk))
                file.write(chunk)
                self._num_bytes += len(chunk)
                self._progress(self._num_bytes)
        return self._num_bytes - before


def _at_most(chunks: Iterable[bytes], limit: int, name: str) -> Iterable[bytes]:
    left = limit
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise PayloadTooLargeError(f"{name} is larger than {limit} bytes.")
        yield chunk


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
