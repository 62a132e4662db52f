"""Bytes as a file, for parsers that take a path."""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NUMBERS = itertools.count()
_FOLDER: list[Path] = []


def fresh_path() -> Path:
    """A path where nothing is, in memory if the machine has a file system there."""
    if not _FOLDER:
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        _FOLDER.append(Path(tempfile.mkdtemp(prefix="lora_serve-fuzz-", dir=in_memory)))
        atexit.register(shutil.rmtree, _FOLDER[0], ignore_errors=True)
    return _FOLDER[0] / str(next(_NUMBERS))


@contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    """A file with this content, for as long as the block lasts."""
    path = fresh_path()
    path.write_bytes(data)
    try:
        yield path
    finally:
        path.unlink()


@contextmanager
def empty_folder() -> Iterator[Path]:
    path = fresh_path()
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)
