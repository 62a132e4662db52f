"""One server per store folder: a lock file says so, and the kernel lets it go when the process dies."""

from __future__ import annotations

import fcntl
import os
from io import FileIO
from pathlib import Path

from lora_serve.adapters.stores.files import FILE_MODE, make_private
from lora_serve.core.errors import ConfigError


def lock_store(store: Path) -> FileIO:
    """Hold the folder until the file is closed. Raises ConfigError if another process holds it, or it is unusable."""
    try:
        make_private(store)
        file = FileIO(os.open(store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE), "rb")
    except OSError as error:
        raise ConfigError(f"--store {store}: the folder cannot be used: {error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"--store {store}: another server is using this store.") from None
    return file
