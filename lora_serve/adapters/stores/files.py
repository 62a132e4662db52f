"""Private folders and durable files: created so that only the owner can read them, and flushed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from lora_serve.adapters.regular_file import link_regular
from lora_serve.core.errors import ConfigError

FOLDER_MODE = 0o700
FILE_MODE = 0o600
# Errors that say that nothing can be written now, and nothing about the file itself.
UNWRITABLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM))


def make_private(folder: Path) -> Path:
    """The folder, made with its parents if need be, durably, readable by its owner only. Raises OSError."""
    missing = list(takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder)) from None
    for made in missing:
        with suppress(PermissionError):  # a parent that this user may change and not read
            flush(made.parent)
    try:
        if stat.S_IMODE(folder.stat().st_mode) != FOLDER_MODE:
            folder.chmod(FOLDER_MODE)
    except OSError as error:
        if error.errno not in UNWRITABLE:  # a folder of another owner, or on a read-only disk, stays as it is
            raise
    return folder


def private_or_later(folder: Path) -> Path:
    """`make_private`, left to the first writer if nothing can be made now. Raises OSError."""
    try:
        return make_private(folder)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return folder


def listed(folder: Path) -> list[Path]:
    """The paths in a folder; none if it does not exist. Raises OSError."""
    return list(folder.iterdir()) if folder.is_dir() else []


def read_small_file(path: Path, max_bytes: int = 2**16) -> bytes:
    """The content of a file. Raises OSError, also for anything but a regular file, or one that is too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, "larger than it may be")
    return content


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
    """Remove a folder with its content, or a file in its place; what cannot be removed is left to the next sweep."""
    if folder.is_symlink() or folder.is_file():
        with suppress(OSError):
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """`target` gets `source`'s content, durable once it is flushed. Raises OSError."""
    link_regular(source, target)
    target.chmod(FILE_MODE)


def flush(path: Path) -> None:
    """fsync a file or a folder (whose entries then survive a crash). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StoreLock:
    """Held until `close`."""

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = list(descriptors)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def lock_store(store: Path) -> StoreLock:
    """Lock the folder. Raises ConfigError if another process has it, or if it is unusable.

    The folder itself is locked too, as a disk that cannot be written may have no lock file.
    """
    try:
        make_private(store)
        found = [*_lock_file(store), os.open(store, os.O_RDONLY | os.O_CLOEXEC)]
    except OSError as error:
        raise ConfigError(f"--store {store}: the folder cannot be used: {error}") from None
    lock, num_held = StoreLock(*found), 0
    for descriptor in found:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            num_held += 1
        except BlockingIOError:
            lock.close()
            raise ConfigError(f"--store {store}: another server is using this store.") from None
        except OSError:  # a network file system may lock files only
            continue
    if not num_held:
        lock.close()
        raise ConfigError(f"--store {store}: this file system cannot lock the folder, nor can a file be made in it.")
    return lock


def _lock_file(store: Path) -> list[int]:
    """The open lock file; empty if there is none and none can be made now. Raises OSError."""
    path, flags = store / "lock", os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return [_checked(os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE))]
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return [_checked(os.open(path, os.O_RDONLY | flags))] if path.exists() else []


def _checked(descriptor: int) -> int:
    """The descriptor of a regular file; anything else is closed. Raises OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "lock is not a file; move it away")
    return descriptor
