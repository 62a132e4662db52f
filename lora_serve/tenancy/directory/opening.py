"""Opens the directory of tenants that the settings name: this server's own, or the one that replicas share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from lora_serve.adapters.catalog.follower import Follower
from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.journals.mirror import open_mirror
from lora_serve.adapters.catalog.journals.mirrored import MirroredJournal
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.opening import redis_journal
from lora_serve.adapters.stores.monitor import StoreMonitor
from lora_serve.core.config import AdapterConfig
from lora_serve.tenancy.directory.branches import merge_branches
from lora_serve.tenancy.directory.directory import TITLE, Directory

JOURNAL = "tenants"  # in Redis' keys
FILE_NAME, MIRROR_NAME = "tenants.sqlite3", "tenants-mirror.sqlite3"


@contextmanager
def open_directory(config: AdapterConfig, monitor: StoreMonitor | None = None) -> Iterator[Directory]:
    """The directory, as long as the block lasts; a shared one follows the other replicas. The caller holds the store.

    While Redis cannot be reached, the last state that was read is in force. `monitor`: opens for writing
    later what can only be read now. Raises ConfigError.
    """
    with closing(Directory(_journal(config, monitor))) as directory:
        if config.redis_url is None:
            yield directory
            return
        with closing(Follower(directory.ledger, lambda: None, TITLE)) as follower:
            follower.start()
            yield directory


def _journal(config: AdapterConfig, monitor: StoreMonitor | None) -> Journal:
    if config.redis_url is None:
        return SqliteJournal(config.store / FILE_NAME, TITLE, monitor)
    shared = redis_journal(config.redis_url, config.redis_prefix, JOURNAL, TITLE)
    return MirroredJournal(shared, open_mirror(config.store / MIRROR_NAME, TITLE, monitor), merge_branches)
