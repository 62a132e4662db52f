"""A folder of this machine, inside an allowed root (--adapter-root).

Its files are copied before they are looked at, as others may be changing them. A file must lie inside an allowed root
after every symlink is followed; that is checked on the opened file, so that no exchange in between can lead outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lora_serve.adapters.checkpoint.content import SIDE_NAMES
from lora_serve.adapters.regular_file import ChangedFileError, NotRegularError, as_regular, pieces_of, size_of
from lora_serve.adapters.sources.base import NAMES, PICKLE_NAME, Intake, OnBytes, no_progress
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError, InvalidRequestError


class FolderSource:
    """See AdapterSource. `source`: a path, absolute or relative to a root, which only the operator is shown."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
        folder = find_folder(source, self._roots)
        copy_files(folder, target, limit, self._roots, progress)
        return f"folder {source}"


def find_folder(source: str | Path, roots: Sequence[Path]) -> Path:
    """`source` as a real folder inside one of `roots`; a relative one is looked up in the working folder and the roots.

    Raises InvalidRequestError, whose text is the same for "outside" and "not there".
    """
    for base in (Path(), *roots):
        try:
            folder = (base / source).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # not there, a null byte, a circle of links
            continue
        if folder.is_dir() and is_inside(folder, roots):
            return folder
    raise InvalidRequestError(
        f"There is no folder {str(source)[:200]!r} inside an allowed root (--adapter-root).", param="source"
    )


def is_inside(path: Path, roots: Sequence[Path]) -> bool:
    """True if the resolved `path` lies in one of `roots`."""
    return any(path.is_relative_to(root.resolve()) for root in roots)


def copy_files(
    source: Path, target: Path, max_bytes: int, roots: Sequence[Path] | None, progress: OnBytes = no_progress
) -> None:
    """Copy the adapter's files; missing files are left to the later checks. Raises OSError.

    `roots`: folders in which the files must really lie (None: anywhere). Raises InvalidAdapterError for anything but
    a regular file in there, PayloadTooLargeError beyond `max_bytes`.
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
    for name in SIDE_NAMES:
        try:
            with _opened(source / name, roots) as file:
                if file is not None:
                    intake.take_side(name, _chunks(file))
        except InvalidAdapterError:
            intake.empty(name)  # refused only if it is needed


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    try:
        yield from pieces_of(file)
    except ChangedFileError:
        raise AdapterUnavailableError("A file of the folder was changed while it was read; try again.") from None


@contextmanager
def _opened(path: Path, roots: Sequence[Path] | None) -> Iterator[BinaryIO | None]:
    try:
        # Links are followed, unlike in the store: a hub's cache consists of them. A FIFO must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    real = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
    try:
        file = as_regular(descriptor, path.name)
    except NotRegularError:
        raise _not_regular(path) from None
    with file:
        if roots is not None and not is_inside(real, roots):
            raise _not_regular(path)
        yield file


def _not_regular(path: Path) -> InvalidAdapterError:
    return InvalidAdapterError([f"{path.name} is not a regular file in its folder"])
