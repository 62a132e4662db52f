"""What comes into a private folder: files that WE name, their bytes counted while they stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from lora_serve.adapters.checkpoint.digest import CONFIG_NAME, MAX_TOKENIZER_BYTES, TOKENIZER_NAME, WEIGHTS_NAME
from lora_serve.core.errors import PayloadTooLargeError

NAMES = (CONFIG_NAME, WEIGHTS_NAME)
PICKLE_NAME = "adapter_model.bin"
CHUNK_BYTES = 2**20
Progress = Callable[[int], None]  # gets the bytes so far; what it raises breaks the transfer off


def no_progress(num_bytes: int) -> None:
    """For callers that do not want to know."""


class Intake:
    """Writes an adapter's files into `folder`, `limit` bytes in all at most."""

    def __init__(self, folder: Path, limit: int, progress: Progress = no_progress) -> None:
        self._folder = folder
        self._limit = limit
        self._progress = progress
        self._num_bytes = 0

    def check_size(self, num_bytes: int) -> None:
        """Before the first byte moves, where the size is known. Raises PayloadTooLargeError."""
        if num_bytes > self._limit - self._num_bytes:
            raise PayloadTooLargeError(f"The adapter's files exceed --max-upload-size ({self._limit} bytes).")

    def take(self, name: str, chunks: Iterable[bytes]) -> int:
        """Write `name`, one of NAMES; its bytes. Raises PayloadTooLargeError, OSError, what `chunks` raises."""
        assert name in NAMES, name
        return self.write(self._folder / name, chunks)

    def take_tokenizer(self, chunks: Iterable[bytes]) -> None:
        """Few adapters need it, so one that is too large is left empty: refused in words only if it is looked at."""
        path, before = self._folder / TOKENIZER_NAME, self._num_bytes
        try:
            self.write(path, _at_most(chunks, MAX_TOKENIZER_BYTES))
        except PayloadTooLargeError:
            self._num_bytes = before
            self.empty(TOKENIZER_NAME)

    def empty(self, name: str) -> None:
        """`name` without content: only the fact that it is there counts (artifact.check_files, added_tokens)."""
        (self._folder / name).write_bytes(b"")

    def beat(self) -> None:
        """Bytes are on their way, counted when they come here: the transfer may be broken off."""
        self._progress(self._num_bytes)

    def write(self, path: Path, chunks: Iterable[bytes]) -> int:
        """Write any file of ours, an archive aside for instance; its bytes. Raises as `take` does."""
        before = self._num_bytes
        with path.open("wb") as file:
            for chunk in chunks:
                self.check_size(len(chunk))
                file.write(chunk)
                self._num_bytes += len(chunk)
                self._progress(self._num_bytes)
        return self._num_bytes - before


def _at_most(chunks: Iterable[bytes], limit: int) -> Iterable[bytes]:
    left = limit
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise PayloadTooLargeError(f"{TOKENIZER_NAME} is larger than {limit} bytes.")
        yield chunk
