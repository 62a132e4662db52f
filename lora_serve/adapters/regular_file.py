"""Opens and reads stored and staged files safely.

No link is followed, so that nothing outside the store is read; opening never blocks, as it would at a FIFO; and a file
is read by the size that it had when it was opened.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 2**20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_REGULAR = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)  # a link, a link to the folder, a socket
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class UnsoundFileError(OSError):
    """A file that can be none of its kind; other errors of reading may pass."""


class NotRegularError(UnsoundFileError):
    """A link, a device, a FIFO, a socket or a folder is where a file should be."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EINVAL, f"{name} is not a regular file")


class TooLargeFileError(UnsoundFileError):
    """A file is larger than any of its kind may be."""

    def __init__(self, name: str, max_bytes: int) -> None:
        super().__init__(errno.EFBIG, f"{name} is larger than {max_bytes} bytes")


class ChangedFileError(OSError):
    """A file became longer or shorter while it was read."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "a file was changed while it was read")


def open_regular(path: Path) -> BinaryIO:
    """Open a file, unbuffered. Neither it nor its folder may be a link. Raises OSError, also NotRegularError."""
    try:
        descriptor = _opened(path)
    except OSError as error:
        raise NotRegularError(path.name) if error.errno in _NOT_REGULAR else error from None
    return as_regular(descriptor, path.name)


def as_regular(descriptor: int, name: str) -> BinaryIO:
    """The open file of a descriptor; closes it and raises NotRegularError if it is not regular."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(name)
    return open(descriptor, "rb", buffering=0)


def size_of(file: BinaryIO) -> int:
    """The present size in bytes."""
    return os.fstat(file.fileno()).st_size


def filled(file: BinaryIO, memory: memoryview) -> Iterator[memoryview]:
    """Read the file into `memory` of the same size, in pieces that fit into the processor's cache.

    Raises ChangedFileError, OSError.
    """
    left = memory
    while left:
        count: int = file.readinto(left[:CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise ChangedFileError
        yield left[:count]
        left = left[count:]
    _check_end(file)


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """The whole file in chunks of at most CHUNK_BYTES. Raises ChangedFileError, OSError."""
    return map(bytes, views_of(file, CHUNK_BYTES))


def views_of(file: BinaryIO, num_bytes: int = 2**18) -> Iterator[memoryview]:
    """The whole file through one buffer: each piece is valid until the next. Raises ChangedFileError, OSError."""
    left = size_of(file)
    buffer = memoryview(bytearray(min(num_bytes, left)))
    while left:
        count: int = file.readinto(buffer[: min(len(buffer), left)])  # type: ignore[attr-defined]
        if not count:
            raise ChangedFileError
        left -= count
        yield buffer[:count]
    _check_end(file)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a file. Raises OSError, also if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        if size_of(file) > max_bytes:
            raise TooLargeFileError(path.name, max_bytes)
        return b"".join(pieces_of(file))


def copy_regular(source: Path, target: Path) -> None:
    """Copy a file to the new file `target`. Raises OSError."""
    with open_regular(source) as file, target.open("xb") as copy:
        for piece in views_of(file):
            copy.write(piece)


def link_regular(source: Path, target: Path) -> None:
    """Make `target` a hard link of `source` or, where that is not possible, a copy. Raises OSError."""
    with open_regular(source) as file:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            copy_regular(source, target)
            return
        if not os.path.samestat(os.fstat(file.fileno()), target.lstat()):
            target.unlink()
            raise ChangedFileError


def _opened(path: Path) -> int:
    folder = os.open(path.parent, _FOLDER)
    try:
        return os.open(path.name, _FILE, dir_fd=folder)
    finally:
        os.close(folder)


def _check_end(file: BinaryIO) -> None:
    if file.read(1):
        raise ChangedFileError
