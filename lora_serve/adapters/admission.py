"""Copies a folder that others may be changing into one of our own, before anything in it is looked at.

A path given by the admin must lie inside an allowed root after every symlink is followed. The check is made on the
opened file, not on the name, so that no exchange in between can lead outside.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lora_serve.adapters.checkpoint.digest import CONFIG_NAME, WEIGHTS_NAME
from lora_serve.adapters.checkpoint.tokenizer_file import MAX_TOKENIZER_BYTES, TOKENIZER_NAME
from lora_serve.core.errors import InvalidAdapterError, InvalidRequestError, PayloadTooLargeError

NAMES = (CONFIG_NAME, WEIGHTS_NAME)
_CHUNK_BYTES = 2**20


def find_folder(source: str | Path, roots: Sequence[Path]) -> Path:
    """`source` as a real folder inside one of `roots`; if relative, then to the working folder or to a root.

    Raises InvalidRequestError, with the same words for "outside" and "not there".
    """
    for base in (Path(), *roots):
        try:
            folder = (base / source).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # not there, a null byte, a circle of links
            continue
        if folder.is_dir() and is_inside(folder, roots):
            return folder
    raise InvalidRequestError(
        f"{str(source)[:200]!r} is not a folder inside an allowed root (--adapter-root).", param="source"
    )


def is_inside(path: Path, roots: Sequence[Path]) -> bool:
    """Whether the resolved `path` lies in one of `roots`."""
    return any(path.is_relative_to(root.resolve()) for root in roots)


def copy_files(source: Path, target: Path, max_bytes: int, roots: Sequence[Path] | None) -> None:
    """Copy the adapter's files; those that are missing are left to the later checks. Raises OSError.

    `roots`: where the files must really lie (None: anywhere). Raises InvalidAdapterError for what is no regular file
    in there, PayloadTooLargeError beyond `max_bytes`.
    """
    left = max_bytes
    for name in (*NAMES, "adapter_model.bin"):
        with _opened(source / name, roots) as file:
            if file is None:
                continue
            if name not in NAMES:
                (target / name).touch()  # only the fact counts: artifact.check_files refuses it in words
                continue
            left = _copy(file, target / name, left, max_bytes)
    _copy_tokenizer(source, target, left, roots)


def _copy_tokenizer(source: Path, target: Path, left: int, roots: Sequence[Path] | None) -> None:
    """Few adapters need it, so one that cannot be taken is left empty: refused in words only if it is looked at."""
    try:
        with _opened(source / TOKENIZER_NAME, roots) as file:
            if file is None:
                return
            limit = min(left, MAX_TOKENIZER_BYTES)
            _copy(file, target / TOKENIZER_NAME, limit, limit)
    except (InvalidAdapterError, PayloadTooLargeError):
        (target / TOKENIZER_NAME).write_bytes(b"")


@contextmanager
def _opened(path: Path, roots: Sequence[Path] | None) -> Iterator[BinaryIO | None]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hold us up
    except OSError:
        yield None
        return
    with open(descriptor, "rb") as file:
        real = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        inside = roots is None or is_inside(real, roots)
        if not inside or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidAdapterError([f"{path.name} is not a regular file in its folder"])
        yield file


def _copy(file: BinaryIO, target: Path, left: int, max_bytes: int) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > left:
        raise PayloadTooLargeError(f"The adapter's files exceed --max-upload-size ({max_bytes} bytes).")
    with target.open("wb") as copy:
        while left >= 0 and (chunk := file.read(min(_CHUNK_BYTES, left + 1))):
            copy.write(chunk)
            left -= len(chunk)
    if left < 0:  # it grew while we read
        raise PayloadTooLargeError(f"The adapter's files exceed --max-upload-size ({max_bytes} bytes).")
    return left
