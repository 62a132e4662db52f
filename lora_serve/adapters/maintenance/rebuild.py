"""Rebuilds a catalog from the blobs and their records, in a store folder or in Redis.

Killed at any step, it loses nothing and can be repeated: blobs come first, then the catalog that names them in one
step, then unnamed blobs are set aside.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.catalog.blob_leases import CatalogHistory
from lora_serve.adapters.catalog.blob_records import BlobRecord, digests_of, read_records, sync_records
from lora_serve.adapters.catalog.journals.base import Journal, Position
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.opening import CATALOG_NAME, DamagedCatalogError, load_own
from lora_serve.adapters.catalog.state import ADAPTER, ALIAS, CatalogState, Lineage, lineage_change, saved
from lora_serve.adapters.checkpoint.content import content_names
from lora_serve.adapters.maintenance.copying import OnProgress
from lora_serve.adapters.maintenance.rebuild_plan import RebuildOutcome, RebuildPlan, SurvivingBlobs, plan_rebuild
from lora_serve.adapters.maintenance.registries import RegistryAddress, is_readable, open_redis_store
from lora_serve.adapters.regular_file import copy_regular
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import flush, lock_store, scratch_folder
from lora_serve.core.errors import AdapterUnavailableError

_TRIES = 10  # commits of servers that may come first
_LEAP = 1_000_000  # more commits than a lost catalog can have made after its last record beside a blob
_MAX_GAPS = 50
_FILES = ("", "-wal", "-shm")  # of one database


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """`was`: "lost", "damaged", "older" or "good". `kept`: the old catalog's file. `aside`: digests without a name."""

    plan: RebuildPlan
    was: str
    kept: str
    aside: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """True if every id and version that any source knows is served again."""
        return not any(one.outcome is RebuildOutcome.LOST or one.missing for one in self.plan.ids)


def rebuild_folder(store: Path, also: Sequence[Path], is_dry: bool, on_progress: OnProgress) -> RebuildReport:
    """Rebuild a store folder's catalog; `also`: other stores to take blobs from.

    Raises ConfigError, AdapterUnavailableError.
    """
    with closing(lock_store(store)):
        survived, was = _survived(store)
        surviving = SurvivingBlobs(store, also, on_progress)
        plan = plan_rebuild(
            survived, surviving.records, surviving.copies, lambda digest: surviving.sound(digest) is not None
        )
        state = survived or CatalogState()
        is_changed = was != "good" or _changes(state, plan) != {}
        named = plan.snapshot(Position()).digests
        if is_dry:
            return RebuildReport(plan, was, "", tuple(sorted(surviving.digests - named)))
        try:
            disk = DiskStore(store)
            _bring_in(disk, surviving, named, disk.tmp)
            made, kept = state, ""
            if is_changed:
                made = _made(state, plan, [*surviving.records, *surviving.copies])
                kept = _replace(
                    store, _changes(CatalogState(), plan) | lineage_change(made.lineage or Lineage()), made.position
                )
            _tidy(disk, named, CatalogHistory(state))
            sync_records(disk, made, is_changed)
            aside = disk.orphans.digests()
        except OSError as error:
            raise AdapterUnavailableError(f"The store cannot be written: {error.strerror or error}.") from None
        return RebuildReport(plan, was, kept, aside)


def rebuild_redis(
    address: RegistryAddress, also: Sequence[Path], is_dry: bool, on_progress: OnProgress
) -> RebuildReport:
    """Rebuild a shared registry; servers may be running. Raises ConfigError, AdapterUnavailableError."""
    with open_redis_store(address) as (journal, store, tmp):
        surviving = SurvivingBlobs(None, also, on_progress)
        sound: dict[str, bool] = {}

        def is_sound(digest: str) -> bool:
            if digest not in sound:
                sound[digest] = is_readable(store, digest) or surviving.sound(digest) is not None
            return sound[digest]

        for _ in range(_TRIES):
            state = CatalogState.of(journal.load())
            there = store.digests()
            records = read_records(store, there)
            survived = state if state.lineage is not None or state.snapshot.entries else None
            was = _kind(survived, records)
            plan = plan_rebuild(survived, records, surviving.copies, is_sound)
            named = plan.snapshot(Position()).digests
            aside = tuple(sorted((there | surviving.digests) - named))
            if is_dry:
                return RebuildReport(plan, was, "", aside)
            _bring_in(store, surviving, named, tmp)
            made = _made(state, plan, [*records, *surviving.copies])
            if was == "good" and not _changes(state, plan):
                made = state
            elif not _write(journal, state, plan, made):
                continue
            sync_records(store, made, made is not state)
            return RebuildReport(plan, was, "", aside)
    raise AdapterUnavailableError("The registry is being changed by too many at once; try again.")


def _survived(store: Path) -> tuple[CatalogState | None, str]:
    try:
        state = load_own(store)
    except DamagedCatalogError:
        return None, "damaged"
    if state is None or not state.position.epoch:
        return None, "lost"
    records = read_records(disk := DiskStore(store), disk.digests())
    return state, _kind(state, records)


def _kind(state: CatalogState | None, records: Iterable[BlobRecord]) -> str:
    if state is None or not state.position.epoch:
        return "lost"
    history = CatalogHistory(state)
    if not all(history.includes(record.position) for record in records):
        return "older"
    return "damaged" if state.snapshot.held else "good"


def _position(state: CatalogState, records: Sequence[BlobRecord]) -> Position:
    """A position that no known catalog has written at.

    The epoch is the newest known one: a registry that was set back may have had another since.
    """
    history, own = CatalogHistory(state), state.position
    newer = [record for record in records if history.is_ahead(record) and record.position.epoch != own.epoch]
    candidates = newer or ([] if own.epoch else list(records))
    last = max(candidates, key=lambda record: record.time, default=None)
    epoch = last.position.epoch if last else own.epoch or uuid.uuid4().hex
    seen = [record.position.generation for record in records if record.position.epoch == epoch]
    return Position(epoch, max([own.generation, *seen]) + _LEAP, uuid.uuid4().hex)


def _bring_in(store: AdapterStore, surviving: SurvivingBlobs, named: Set[str], tmp: Path) -> None:
    """Copies named blobs into the store that it lacks, or has only broken."""
    for digest in named:
        folder = surviving.sound(digest)
        if folder is not None and not is_readable(store, digest):
            with scratch_folder(tmp) as scratch:
                for name in content_names(folder):
                    copy_regular(folder / name, scratch / name)
                store.put(digest, scratch)


def _changes(state: CatalogState, plan: RebuildPlan) -> Changes:
    """The changes from the catalog of `state` to the planned one."""
    old = state.snapshot
    changes: Changes = {kind + name: None for name in old.held for kind in (ADAPTER, ALIAS)}
    for name, entry in plan.entries.items():
        if old.entries.get(name) != entry:
            changes |= saved(entry)
    changes |= {ALIAS + alias: to for alias, to in plan.aliases.items() if old.aliases.get(alias) != to}
    return changes | {ALIAS + alias: None for alias in old.aliases.keys() - plan.aliases.keys()}


def _made(state: CatalogState, plan: RebuildPlan, records: Sequence[BlobRecord]) -> CatalogState:
    """The planned catalog; the generations between the old one and this one are a gap of its lineage."""
    position = _position(state, records)
    return CatalogState(plan.snapshot(position), lineage=_lineage(state, position, records))


def _lineage(state: CatalogState, position: Position, records: Iterable[BlobRecord]) -> Lineage:
    """The lineage with the gap, and the epochs of all records that were found."""
    gap = (state.position.generation + 1, position.generation - 1)
    found = [epoch for record in records for epoch in (*record.epochs, record.position.epoch)]
    epochs = dict.fromkeys((*(state.lineage.epochs if state.lineage else ()), state.position.epoch, *found))
    earlier = (epoch for epoch in epochs if epoch not in ("", position.epoch))
    return Lineage((*state.gaps[-_MAX_GAPS:], gap), (*earlier, position.epoch))


def _replace(store: Path, records: Changes, position: Position) -> str:
    """Puts a new catalog in the place of the old one, which is kept; returns that one's name. Raises OSError."""
    made = store / f"{CATALOG_NAME}.new"
    for end in _FILES:
        (store / f"{made.name}{end}").unlink(missing_ok=True)
    journal = SqliteJournal(made)
    try:
        journal.commit(Position(), records, position)
    finally:
        journal.close()
    flush(made)
    kept = f"{CATALOG_NAME}.{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}.old"
    is_kept = False
    for end in reversed(_FILES):
        with suppress(FileNotFoundError):
            os.rename(store / f"{CATALOG_NAME}{end}", store / f"{kept}{end}")
            is_kept = True
    made.rename(store / CATALOG_NAME)
    flush(store)
    return kept if is_kept else ""


def _tidy(disk: DiskStore, named: Set[str], history: CatalogHistory) -> None:
    """Sets unnamed blobs aside, or frees them if they were deleted; drops orphaned copies of named ones."""
    disk.sweep(named, history.may_delete)
    disk.orphans.drop(named & disk.digests())


def _write(journal: Journal, state: CatalogState, plan: RebuildPlan, made: CatalogState) -> bool:
    """Returns False if a server was first."""
    changes = _changes(state if state.position.epoch else CatalogState(), plan)
    return (
        journal.commit(state.position, changes | lineage_change(made.lineage or Lineage()), made.position) is not None
    )


def accept_folder(store: Path) -> int:
    """Accept the catalog as it is; returns the number of unknown blobs, which are set aside.

    Raises ConfigError for a damaged catalog.
    """
    with closing(lock_store(store)):
        state = load_own(store) or CatalogState()
        try:
            disk = DiskStore(store)
            before = disk.digests()
            held = digests_of(disk, state.unreadable, before)
            disk.sweep(state.snapshot.digests | held, lambda *_: False)
            with closing(SqliteJournal(store / CATALOG_NAME)) as journal:
                surviving = SurvivingBlobs(store, [])
                found = [*surviving.records, *surviving.copies]
                again = _position(state, found)
                journal.commit(state.position, lineage_change(_lineage(state, again, found)), again)
                sync_records(disk, CatalogState.of(journal.load()), is_anew=True)
        except OSError as error:
            raise AdapterUnavailableError(f"The store cannot be written: {error.strerror or error}.") from None
        return len(before - disk.digests())


def accept_redis(address: RegistryAddress) -> None:
    """Accept the registry as it is; blobs in Redis stay, replicas set unknown ones in their caches aside."""
    with open_redis_store(address) as (journal, store, _):
        state = CatalogState.of(journal.load())
        found = read_records(store, store.digests())
        again = _position(state, found)
        changes = {} if state.position.epoch else _changes(CatalogState(), plan_rebuild(state, [], [], lambda _: True))
        if journal.commit(state.position, changes | lineage_change(_lineage(state, again, found)), again) is None:
            raise AdapterUnavailableError("A server has changed the registry meanwhile; try again.")
