"""Loads the engine of a replica. Imported in its actor alone: torch."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import StoreLock, lock_store, remove_folder
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.messages import Configure
from lora_serve.engine_host.fleet.blobs import scratch_prefix
from lora_serve.engine_host.fleet.replica_blobs import ReplicaBlobs
from lora_serve.logs import configure_logging, timed
from lora_serve.model.loading.transformers_import import import_transformers
from lora_serve.model.system.threads import use_one_core

if TYPE_CHECKING:
    from lora_serve.engine_host.local import LocalEngine

_PREFIX = "lora_serve-"
_YOUNG = 60.0  # seconds in which a folder may not be locked yet


def load_engine(configure: Configure, replica: str, files: Path) -> tuple[LocalEngine, ReplicaBlobs]:
    """The engine, and the folders that its loaders read; copies of them lie in `files`, if nothing else was said.

    Raises ModelError, ConfigError, OSError.
    """
    import_transformers(configure.model.quantization, configure.model.model)
    configure_logging("json")  # the server takes the lines apart (output.py)
    from lora_serve.engine_host.local import LocalEngine, build_parts
    from lora_serve.text.tokenizer import TextModel

    use_one_core()
    with timed(f"model {configure.model.model}"):
        parts = build_parts(configure.model, configure.engine, configure.adapters)
    gc.freeze()
    blobs = ReplicaBlobs(_cache(configure.adapters, files), scratch_prefix(replica))
    engine = LocalEngine(parts, configure.engine, configure.adapters, blobs, lambda: TextModel.load(parts.spec.name))
    return engine, blobs


def _cache(config: AdapterConfig, files: Path) -> DiskStore:
    """For copies of what this machine does not see: as many bytes as a server's own cache, or half of what is free."""
    folder, _ = own_folder(files if config.store == Path() else config.store)  # locked until this process ends
    max_bytes = config.adapter_disk_memory or shutil.disk_usage(folder).free // 2
    return DiskStore(folder, max_bytes, is_cache=True, policy=config.adapter_eviction)


def own_folder(parent: Path) -> tuple[Path, StoreLock]:
    """A new folder of this replica's own, whose lock ends with the process. Those of processes that ended, however they
    did, are removed. Raises OSError.
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
