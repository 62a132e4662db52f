"""One server per store folder, by locks that the kernel releases when the process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from lora_serve.adapters.stores.files import FILE_MODE, UNWRITABLE, make_private
from lora_serve.core.errors import ConfigError


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
