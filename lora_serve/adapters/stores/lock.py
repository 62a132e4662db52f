"""One server per store folder: locks say so, and the kernel lets them go when the process dies."""

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
    """Hold the folder. Raises ConfigError if another process holds it, or it is unusable.

    A disk that cannot be written, and has no lock file yet, lets the folder itself be locked; so it always is.
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
        except OSError:  # a network's file system may lock files only
            continue
    if not num_held:
        lock.close()
        raise ConfigError(f"--store {store}: this file system cannot lock the folder, nor can a file be made in it.")
    return lock


def _lock_file(store: Path) -> list[int]:
    """None if it is not there and cannot be made now. Raises OSError."""
    path, flags = store / "lock", os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return [_checked(os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE))]
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
    return [_checked(os.open(path, os.O_RDONLY | flags))] if path.exists() else []


def _checked(descriptor: int) -> int:
    """Raises OSError for what is no file: a pipe or a device, also behind a link, and closes it."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "lock is not a file; move it away")
    return descriptor
