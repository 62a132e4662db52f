"""Opens the directory of tenants that the settings name: this server's own, or the one that replicas share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace

from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.catalog.journals.mirrored import MirroredJournal, open_mirror
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.ledger import Follower
from lora_serve.adapters.catalog.opening import redis_journal
from lora_serve.adapters.stores.monitor import StoreMonitor
from lora_serve.core.config import AdapterConfig
from lora_serve.tenancy.directory.directory import TITLE, Directory
from lora_serve.tenancy.directory.documents import document_of, key_of
from lora_serve.tenancy.directory.state import KEY, TENANT

JOURNAL = "tenants"  # in Redis' keys
FILE_NAME, MIRROR_NAME = "tenants.sqlite3", "tenants-mirror.sqlite3"
Records = dict[str, str]
_Contested = Mapping[str, tuple[str | None, str | None]]


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


def merge_branches(records: Records, contested: _Contested) -> Records:
    """`records`, with the names that may have changed on both branches, (ours, theirs), after a shared journal was
    started from an older state and went on.

    A record that is gone on one branch is gone, a key that was ended on one is ended, and otherwise theirs, the branch
    that went on, counts. Keys without a tenant are dropped.
    """
    merged = dict(records)
    for name, (ours, theirs) in contested.items():
        if ours is None or theirs is None:
            merged.pop(name, None)
        else:
            merged[name] = _ended_as_either(name, ours, theirs) if name.startswith(KEY) else theirs
    return {name: text for name, text in merged.items() if not _is_orphan(name, text, merged)}


def _ended_as_either(name: str, ours: str, theirs: str) -> str:
    our, their = (key_of(name.removeprefix(KEY), text) for text in (ours, theirs))
    if our is None or their is None:
        return theirs if our is None else ours
    revoked, expires = _sooner(our.revoked, their.revoked), _sooner(our.expires, their.expires)
    return document_of(replace(their, revoked=revoked, expires=expires))


def _sooner(one: float | None, other: float | None) -> float | None:
    times = [time for time in (one, other) if time is not None]
    return min(times, default=None)


def _is_orphan(name: str, text: str, records: Mapping[str, str]) -> bool:
    """True for a key whose tenant is gone: it would be valid again once there is a tenant of that name."""
    key = key_of(name.removeprefix(KEY), text) if name.startswith(KEY) else None
    return key is not None and TENANT + key.tenant not in records
