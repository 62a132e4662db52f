"""Private folders and durable files: what survives a crash, and who may read it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lora_serve.adapters.regular_file import link_regular

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def make_private(folder: Path) -> Path:
    """The folder, made with its parents if need be, readable by its owner only. Raises OSError."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    with suppress(PermissionError):  # another owner's folder that we may write to stays as it is
        folder.chmod(FOLDER_MODE)
    return folder


def new_folder(parent: Path, prefix: str = "") -> Path:
    """A fresh private folder of a random name in `parent`. Raises OSError."""
    folder = make_private(parent) / f"{prefix}{uuid.uuid4().hex}"
    folder.mkdir(mode=FOLDER_MODE)
    return folder


@contextmanager
def scratch_folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """A fresh private folder that is gone afterwards."""
    folder = new_folder(parent, prefix)
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove it with all it holds, or what lies there in a folder's place; what cannot be removed is left to the next
    sweep.
    """
    if folder.is_symlink() or folder.is_file():
        with suppress(OSError):
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """`target` gets `source`'s content, durably. Raises OSError."""
    link_regular(source, target)
    target.chmod(FILE_MODE)
    flush(target)


def flush(path: Path) -> None:
    """fsync a file or a folder (whose entries then survive a crash). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
