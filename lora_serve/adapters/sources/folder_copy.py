"""Copies a folder that others may be changing into one of our own, before anything in it is looked at.

A path given by the admin must lie inside an allowed root after every symlink is followed. The check is made on the
opened file, not on the name, so that no exchange in between can lead outside.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lora_serve.adapters.checkpoint.digest import TOKENIZER_NAME
from lora_serve.adapters.regular_file import ChangedFileError, NotRegularError, as_regular, pieces_of, size_of
from lora_serve.adapters.sources.intake import NAMES, PICKLE_NAME, Intake, Progress, no_progress
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.adapters.stores.monitor import words_of
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidAdapterError,
    InvalidRequestError,
    StoreUnwritableError,
)

_log = logging.getLogger(__name__)


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


def copy_files(
    source: Path, target: Path, max_bytes: int, roots: Sequence[Path] | None, progress: Progress = no_progress
) -> None:
    """Copy the adapter's files; those that are missing are left to the later checks. Raises OSError.

    `roots`: where the files must really lie (None: anywhere). Raises InvalidAdapterError for what is no regular file
    in there, PayloadTooLargeError beyond `max_bytes`.
    """
    intake = Intake(target, max_bytes, progress)
    for name in (*NAMES, PICKLE_NAME):
        with _opened(source / name, roots) as file:
            if file is None:
                continue
            if name == PICKLE_NAME:
                intake.empty(name)  # artifact.check_files refuses it in words
                continue
            intake.check_size(size_of(file))
            intake.take(name, _chunks(file))
    try:
        with _opened(source / TOKENIZER_NAME, roots) as file:
            if file is not None:
                intake.take_tokenizer(_chunks(file))
    except InvalidAdapterError:
        intake.empty(TOKENIZER_NAME)  # refused in words only if it is looked at


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    try:
        yield from pieces_of(file)
    except ChangedFileError:
        raise AdapterUnavailableError("A file of the folder was changed while it was read; try again.") from None


@contextmanager
def _opened(path: Path, roots: Sequence[Path] | None) -> Iterator[BinaryIO | None]:
    try:
        # Links are followed, unlike in the store: a hub's cache is made of them. A FIFO must not hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    real = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
    try:
        file = as_regular(descriptor, path.name)
    except NotRegularError:
        raise _stranger(path) from None
    with file:
        if roots is not None and not is_inside(real, roots):
            raise _stranger(path)
        yield file


def _stranger(path: Path) -> InvalidAdapterError:
    return InvalidAdapterError([f"{path.name} is not a regular file in its folder"])


@contextmanager
def private_folder(make: Callable[[], Path]) -> Iterator[Path]:
    """The folder that `make` gives, gone afterwards. Raises StoreUnwritableError in place of OSError."""
    folder = None
    try:
        folder = make()
        yield folder
    except OSError as error:
        _log.warning("registration failed: %r", error)
        raise StoreUnwritableError(f"The store cannot be written at present: {words_of(error)}.") from None
    finally:
        if folder is not None:
            remove_folder(folder)
