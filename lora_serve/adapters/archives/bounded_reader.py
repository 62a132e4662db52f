"""Files that refuse to be read too much: of all, or at once."""

from __future__ import annotations

import io
import os
import zipfile
from typing import IO

from lora_serve.core.errors import PayloadTooLargeError

MAX_READ_BYTES = 2**20


class ByteAllowance:
    """How many bytes an archive may still give."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def spend(self, chunk: bytes) -> bytes:
        """The chunk, counted. Raises PayloadTooLargeError."""
        self._left -= len(chunk)
        if self._left < 0:
            raise PayloadTooLargeError("The archive's content exceeds --max-upload-size.")
        return chunk


class BoundedReader:
    """Reads forwards, `max_bytes` in all at most."""

    def __init__(self, source: IO[bytes], max_bytes: int) -> None:
        self._source = source
        self._allowance = ByteAllowance(max_bytes)

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer at the end only. Raises PayloadTooLargeError."""
        return self._allowance.spend(self._source.read(size))


class CappedFile(io.RawIOBase):
    """A file for `zipfile`, which reads a whole central directory at once: no more than MAX_READ_BYTES in one read."""

    def __init__(self, file: IO[bytes], size: int | None = None) -> None:
        """`size`: of the part that is shown, from the start on; None: all of it."""
        super().__init__()
        self._file = file
        self._size = os.fstat(file.fileno()).st_size if size is None else size

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises BadZipFile if that is too much at once."""
        left = max(self._size - self._file.tell(), 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > MAX_READ_BYTES:
            raise zipfile.BadZipFile("its directory is too long")
        return self._file.read(wanted)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Raises BadZipFile for a place before the file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._file.tell(), os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise zipfile.BadZipFile("an offset points outside")
        return self._file.seek(min(base + offset, self._size))

    def tell(self) -> int:
        """Bytes from the start."""
        return self._file.tell()

    def seekable(self) -> bool:
        """Yes."""
        return True

    def readable(self) -> bool:
        """Yes."""
        return True
