"""Makes a catalog again from the blobs and their records, in a store folder or in Redis.

At whatever step it is killed, what there was is still there, and the same again completes it: blobs come first, then
the catalog that names them, in one step, then what it does not name is set aside.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.catalog.blob_records import BlobRecord, record_of
from lora_serve.adapters.catalog.blob_writer import sync_records
from lora_serve.adapters.catalog.history import CatalogHistory
from lora_serve.adapters.catalog.journals.base import Journal, Position
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.opening import CATALOG_NAME, DamagedCatalogError, load_own
from lora_serve.adapters.catalog.state import ALIAS, CatalogState, Lineage, lineage_change, saved
from lora_serve.adapters.checkpoint.digest import content_names
from lora_serve.adapters.maintenance.integrity import is_readable
from lora_serve.adapters.maintenance.rebuild_plan import RebuildOutcome, RebuildPlan, plan_rebuild
from lora_serve.adapters.maintenance.registries import RegistryAddress, open_redis_store
from lora_serve.adapters.maintenance.surviving_blobs import OnProgress, SurvivingBlobs
from lora_serve.adapters.regular_file import copy_regular
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import flush, scratch_folder
from lora_serve.adapters.stores.lock import lock_store
from lora_serve.core.errors import AdapterUnavailableError

_TRIES = 10  # servers' commits that may come between
_LEAP = 1_000_000  # more commits than a lost catalog can have made after the last record beside a blob
_MAX_GAPS = 50
_FILES = ("", "-wal", "-shm")  # of one database


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """`was`: "lost", "damaged", "older" or "good". `kept`: the old catalog's file. `aside`: what nothing names."""

    plan: RebuildPlan
    was: str
    kept: str
    aside: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every id and every version that anything tells of is served again."""
        return not any(one.outcome is RebuildOutcome.LOST or one.missing for one in self.plan.ids)


def rebuild_folder(store: Path, also: Sequence[Path], is_dry: bool, on_progress: OnProgress) -> RebuildReport:
    """`also`: other store folders to take blobs from. Raises ConfigError, AdapterUnavailableError."""
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
            aside = tuple(sorted({digest for digest, _ in disk.orphans.all()}))
        except OSError as error:
            raise AdapterUnavailableError(f"The store cannot be written: {error.strerror or error}.") from None
        return RebuildReport(plan, was, kept, aside)


def rebuild_redis(
    address: RegistryAddress, also: Sequence[Path], is_dry: bool, on_progress: OnProgress
) -> RebuildReport:
    """Servers may be running on it. Raises ConfigError, AdapterUnavailableError."""
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
            records = _records(store, there)
            survived = state if state.has_lineage or state.snapshot.entries else None
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
    records = _records(disk := DiskStore(store), disk.digests())
    return state, _kind(state, records)


def _kind(state: CatalogState | None, records: Iterable[BlobRecord]) -> str:
    if state is None or not state.position.epoch:
        return "lost"
    history = CatalogHistory(state)
    return "good" if all(history.includes(record.position) for record in records) else "older"


def _records(store: AdapterStore, digests: Iterable[str]) -> list[BlobRecord]:
    texts = [text for found in store.records(list(digests)).values() for text in found.values()]
    return [record for text in texts if (record := record_of(text)) is not None]


def _position(state: CatalogState, records: Sequence[BlobRecord]) -> Position:
    """One that nothing was written at yet, neither by the catalog that was nor by one that is still found somewhere.

    The epoch is the newest that it has gone through: a registry that was set back may have been under another since.
    """
    history, own = CatalogHistory(state), state.position
    newer = [record for record in records if history.is_ahead(record) and record.position.epoch != own.epoch]
    candidates = newer or ([] if own.epoch else list(records))
    last = max(candidates, key=lambda record: record.time, default=None)
    epoch = last.position.epoch if last else own.epoch or uuid.uuid4().hex
    seen = [record.position.generation for record in records if record.position.epoch == epoch]
    return Position(epoch, max([own.generation, *seen]) + _LEAP, uuid.uuid4().hex)


def _bring_in(store: AdapterStore, surviving: SurvivingBlobs, named: frozenset[str], tmp: Path) -> None:
    """Blobs that are to be named and that lie elsewhere, or are broken where they should be."""
    for digest in named:
        folder = surviving.sound(digest)
        if folder is not None and not is_readable(store, digest):
            with scratch_folder(tmp) as scratch:
                for name in content_names(folder):
                    copy_regular(folder / name, scratch / name)
                store.put(digest, scratch)


def _changes(state: CatalogState, plan: RebuildPlan) -> Changes:
    """What makes the catalog of `state` that of the plan."""
    old = state.snapshot
    changes: Changes = {}
    for name, entry in plan.entries.items():
        if old.entries.get(name) != entry:
            changes |= saved(entry)
    changes |= {ALIAS + alias: to for alias, to in plan.aliases.items() if old.aliases.get(alias) != to}
    return changes | {ALIAS + alias: None for alias in old.aliases.keys() - plan.aliases.keys()}


def _made(state: CatalogState, plan: RebuildPlan, records: Sequence[BlobRecord]) -> CatalogState:
    """The catalog to be: what lies between the one that was, and this one, is not of its past."""
    position = _position(state, records)
    return CatalogState(plan.snapshot(position), lineage=_lineage(state, position, records))


def _lineage(state: CatalogState, position: Position, records: Iterable[BlobRecord]) -> Lineage:
    """It knows of the epochs of all that was found."""
    old = state.lineage or Lineage()
    gap = (state.position.generation + 1, position.generation - 1)
    found = [epoch for record in records for epoch in (*record.epochs, record.position.epoch)]
    epochs = dict.fromkeys((*old.epochs, state.position.epoch, *found))
    earlier = (epoch for epoch in epochs if epoch not in ("", position.epoch))
    return Lineage((*old.gaps[-_MAX_GAPS:], gap), (*earlier, position.epoch))


def _replace(store: Path, records: Changes, position: Position) -> str:
    """Put a new catalog in the old one's place, which is kept beside it; its name. Raises OSError."""
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


def _tidy(disk: DiskStore, named: frozenset[str], history: CatalogHistory) -> None:
    """What nothing names is set aside, or freed if it was let go; what is named again need not be there twice."""
    disk.sweep(named, history.may_delete)
    disk.orphans.drop(named & disk.digests())


def _write(journal: Journal, state: CatalogState, plan: RebuildPlan, made: CatalogState) -> bool:
    """False: a server was first."""
    changes = _changes(state if state.position.epoch else CatalogState(), plan)
    return (
        journal.commit(state.position, changes | lineage_change(made.lineage or Lineage()), made.position) is not None
    )


def accept_folder(store: Path) -> int:
    """Go on with what the catalog says: blobs that it does not know are set aside, how many.

    Raises ConfigError for a catalog that is damaged.
    """
    with closing(lock_store(store)):
        state = load_own(store) or CatalogState()
        try:
            disk = DiskStore(store)
            before = disk.digests()
            disk.sweep(state.snapshot.digests, lambda *_: False)
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
    """Go on with what the registry says; blobs in Redis stay, those in replicas' caches are set aside by them."""
    with open_redis_store(address) as (journal, store, _):
        state = CatalogState.of(journal.load())
        found = _records(store, store.digests())
        again = _position(state, found)
        changes = {} if state.position.epoch else _changes(CatalogState(), plan_rebuild(state, [], [], lambda _: True))
        if journal.commit(state.position, changes | lineage_change(_lineage(state, again, found)), again) is None:
            raise AdapterUnavailableError("A server has changed the registry meanwhile; try again.")
