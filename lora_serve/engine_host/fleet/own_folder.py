"""A replica's own folder, for copies of adapters: by itself among Ray's own files, which end with the cluster."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lora_serve.adapters.stores.files import remove_folder
from lora_serve.adapters.stores.lock import StoreLock, lock_store
from lora_serve.core.errors import ConfigError

_PREFIX = "lora_serve-"
_YOUNG = 60.0  # seconds in which a folder may not be locked yet


def own_folder(parent: Path) -> tuple[Path, StoreLock]:
    """A new one, whose lock ends with the process. Those of processes that ended, however they did, are removed. Raises
    OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, ConfigError):  # another process holds it
            _remove_if_left(folder)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    return folder, lock_store(folder)


def _remove_if_left(folder: Path) -> None:
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if is_ours and time.time() - status.st_mtime > _YOUNG:
        lock = lock_store(folder)
        try:
            remove_folder(folder)
        finally:
            lock.close()
