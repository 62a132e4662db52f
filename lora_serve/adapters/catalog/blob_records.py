"""The record beside a blob of each id that names it: the catalog's entry of the id, with the time.

From these records a lost catalog is rebuilt (maintenance/rebuild.py), and they tell whether a catalog knew the blob.

Runs on the thread that commits to the catalog, under the ledger's lock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from lora_serve.adapters.catalog.entry import CatalogEntry, document_of, entry_of
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.ledger import Ledger
from lora_serve.adapters.catalog.state import ADAPTER, ALIAS, CatalogState, Snapshot
from lora_serve.adapters.stores.base import RecordStore
from lora_serve.core.errors import AdapterUnavailableError

FORMAT = 1
RecordPlace = tuple[str, str]  # digest, id
_PIECE = 16  # blobs whose records are looked at while commits wait
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """An id as it was at `position` of a catalog; `aliases` lead to it (name -> target)."""

    entry: CatalogEntry
    aliases: Mapping[str, str]
    position: Position
    time: float  # Unix seconds when it was written
    epochs: tuple[str, ...] = ()  # all that its catalog had had by then

    def is_current(self, entry: CatalogEntry, aliases: Mapping[str, str], epoch: str) -> bool:
        """True if the record agrees with a catalog of this epoch."""
        return self.entry == entry and self.aliases == aliases and self.position.epoch == epoch


def key_of(name: str) -> str:
    """The key of an id's record: of a length that every store takes."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def text_of(record: BlobRecord) -> str:
    """The record as text."""
    position = record.position
    return json.dumps(
        {
            "format": FORMAT,
            "epoch": position.epoch,
            "generation": position.generation,
            "time": record.time,
            "epochs": list(record.epochs),
            "entry": json.loads(document_of(record.entry)),
            "aliases": dict(record.aliases),
        },
        separators=(",", ":"),
    )


def record_of(text: str) -> BlobRecord | None:
    """The record of a text; None for one that no server wrote, or that is incomplete."""
    try:
        fields = json.loads(text)
        position, time = Position(str(fields["epoch"]), int(fields["generation"])), float(fields["time"])
        aliases = {str(name): str(target) for name, target in fields["aliases"].items()}
        epochs = tuple(map(str, fields.get("epochs", ())))
        if fields["format"] != FORMAT or not math.isfinite(time):
            return None
        entry = entry_of(json.dumps(fields["entry"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return None if entry is None else BlobRecord(entry, aliases, position, time, epochs)


def digests_of(store: RecordStore, names: Collection[str], digests: Collection[str]) -> frozenset[str]:
    """Those of `digests` beside which one of these ids has a record. Raises AdapterUnavailableError."""
    keys = set(map(key_of, names))
    return frozenset(d for d, texts in store.records(digests).items() if keys & texts.keys()) if keys else frozenset()


def read_records(store: RecordStore, digests: Collection[str]) -> list[BlobRecord]:
    """All readable records beside these blobs. Raises AdapterUnavailableError."""
    texts = [text for found in store.records(digests).values() for text in found.values()]
    return [record for text in texts if (record := record_of(text)) is not None]


@dataclass(frozen=True, slots=True)
class _Work:
    """The records to write and to remove."""

    written: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))  # digest -> key -> text
    removed: set[RecordPlace] = field(default_factory=set)
    places: set[RecordPlace] = field(default_factory=set)  # that are written

    def write(
        self, state: CatalogState, entry: CatalogEntry, digests: Iterable[str], aliases: Mapping[str, str]
    ) -> None:
        text = text_of(BlobRecord(entry, aliases, state.position, time.time(), state.epochs))
        for digest in digests:
            self.written[digest][key_of(entry.name)] = text
            self.places.add((digest, entry.name))


class BlobRecordWriter:
    """See CommitObserver. `near`: the store's part on this machine, which follows the commits of other replicas."""

    def __init__(self, store: RecordStore, near: RecordStore | None = None) -> None:
        self._store = store
        self._near = near
        self._pending: set[RecordPlace] = set()  # changed under the ledger's lock

    @property
    def has_pending(self) -> bool:
        """True if a record could not be put in its place."""
        return bool(self._pending)

    @contextmanager
    def staged(self, before: CatalogState, after: CatalogState, keys: Collection[str]) -> Iterator[Callable[[], None]]:
        """Raises AdapterUnavailableError if there is no room for a record, unless some records are to be removed."""
        work = _difference(before.snapshot, after, keys)
        with ExitStack() as stack:
            try:
                publish = stack.enter_context(self._store.staging(work.written))
            except AdapterUnavailableError:
                if not work.removed:
                    raise
                publish = _refuse
            yield lambda: self._apply(after.snapshot, work, publish)

    def followed(self, before: CatalogState, after: CatalogState, keys: Collection[str] | None) -> None:
        if self._near is None:
            return
        work = _difference(before.snapshot, after, keys)
        try:
            with self._near.staging(work.written) as publish:
                publish()
            for digest, name in work.removed:
                self._near.remove_record(digest, key_of(name), digest not in after.snapshot.digests)
        except (AdapterUnavailableError, OSError) as error:
            _log.warning("records beside blobs cannot be kept: %s", error)

    def retry_pending(self, ledger: Ledger[CatalogState]) -> None:
        """Retry the records that could not be put in their place. No commit comes between, whose records are newer."""
        with ledger.locked() as state, suppress(AdapterUnavailableError, OSError):
            self._retry(state)
            self._pending.clear()

    def _retry(self, state: CatalogState) -> None:
        work, snapshot = _Work(), state.snapshot
        for digest, name in self._pending:
            entry = snapshot.entries.get(name)
            if entry is not None and digest in entry.digests:
                work.write(state, entry, [digest], snapshot.aliases_of(name))
            else:
                work.removed.add((digest, name))
        with self._store.staging(work.written) as publish:
            publish()
        for digest, name in work.removed:
            self._store.remove_record(digest, key_of(name), digest not in snapshot.digests)

    def _apply(self, snapshot: Snapshot, work: _Work, publish: Callable[[], None]) -> None:
        """Called after the commit, which no failure here undoes."""
        try:
            publish()
        except (AdapterUnavailableError, OSError) as error:
            _log.warning("records beside blobs are pending: %s", error)
            self._pending |= work.places
        for digest, name in work.removed:
            try:
                self._store.remove_record(digest, key_of(name), digest not in snapshot.digests)
            except (AdapterUnavailableError, OSError) as error:
                _log.warning("a record beside a blob is still to be taken away: %s", error)
                self._pending.add((digest, name))


def sync_records(store: RecordStore, state: CatalogState, is_anew: bool = False) -> int:
    """Make the records agree with the catalog, which is known to be good; returns how many were written.

    A store of an older version has no records. `is_anew`: all are written, as of now, since an older copy of the
    catalog may have deleted what this one has. Raises AdapterUnavailableError.
    """
    return _sync(store, state, _names_by_digest(state.snapshot), state.snapshot, is_anew)


def sync_in_pieces(store: RecordStore, ledger: Ledger[CatalogState]) -> Iterator[None]:
    """`sync_records` of what the catalog names now, a few blobs a `next`, between commits, whose records are newer.

    Raises AdapterUnavailableError.
    """
    known = ledger.state.snapshot
    names = _names_by_digest(known)
    digests = list(names)
    for start in range(0, len(digests), _PIECE):
        with ledger.locked() as state:
            _sync(store, state, {digest: names[digest] for digest in digests[start : start + _PIECE]}, known)
        yield


def _sync(
    store: RecordStore, state: CatalogState, names: Mapping[str, set[str]], known: Snapshot, is_anew: bool = False
) -> int:
    """The records beside these digests. `names`: of the ids in `known`, an older snapshot, by digest."""
    work, num_written, found = _Work(), 0, store.records(names.keys())
    aliases = aliases_by_id(state.snapshot)
    for name in {name for own in names.values() for name in own} & state.snapshot.entries.keys():
        entry = state.snapshot.entries[name]
        lagging = list(_lagging(found, entry, aliases.get(name, {}), state))
        digests = entry.digests & found.keys() if is_anew else lagging
        work.write(state, entry, digests, aliases.get(name, {}))
        num_written += len(digests)
    with store.staging(work.written) as publish:
        publish()
    held = set(map(key_of, state.unreadable))
    for digest, texts in found.items():
        for key in texts.keys() - {key_of(name) for name in names[digest]} - held:
            if _is_older(texts[key], known):
                store.remove_record(digest, key, tombstone=False)
    return num_written


def _names_by_digest(snapshot: Snapshot) -> dict[str, set[str]]:
    names: dict[str, set[str]] = defaultdict(set)
    for entry in snapshot.entries.values():
        for version in entry.versions:
            names[version.digest].add(entry.name)
    return names


def aliases_by_id(snapshot: Snapshot) -> dict[str, dict[str, str]]:
    """The aliases (name -> target) of each id that has any."""
    table: dict[str, dict[str, str]] = {}
    for alias, target in snapshot.aliases.items():
        table.setdefault(target.partition("@")[0], {})[alias] = target
    return table


def _lagging(
    found: Mapping[str, Mapping[str, str]], entry: CatalogEntry, aliases: Mapping[str, str], state: CatalogState
) -> Iterator[str]:
    """The digests beside which the id has no record, or an outdated one."""
    key, epoch = key_of(entry.name), state.position.epoch
    routed = {version.digest for version in entry.routed}
    for digest in entry.digests & found.keys():
        record = record_of(found[digest].get(key, ""))
        if record is None or record.position.epoch != epoch or record.epochs != state.epochs:
            yield digest
        elif digest in routed and record.position.generation <= state.position.generation:
            yield from [] if record.is_current(entry, aliases, epoch) else [digest]


def _is_older(text: str, snapshot: Snapshot) -> bool:
    record = record_of(text)
    own = snapshot.position
    return record is None or record.position.epoch != own.epoch or record.position.generation <= own.generation


def _difference(before: Snapshot, state: CatalogState, keys: Collection[str] | None) -> _Work:
    """The work that brings the records from `before` to `state`. `keys` of the changed records; None: unknown."""
    work, after = _Work(), state.snapshot
    for name in _changed(before, after, keys):
        old, new = before.entries.get(name), after.entries.get(name)
        aliases = after.aliases_of(name)
        if new is not None and (new != old or aliases != before.aliases_of(name)):
            added = _digests(new) - _digests(old)
            work.write(state, new, {version.digest for version in new.routed} | added, aliases)
        work.removed.update((digest, name) for digest in _digests(old) - _digests(new))
    return work


def _changed(before: Snapshot, after: Snapshot, keys: Collection[str] | None) -> Collection[str]:
    """The ids whose entries or aliases may have changed. One that loses an alias comes after the one that gets it: if
    the writer is killed between the two, some record still tells of the alias.
    """
    if before.entries is after.entries and before.aliases is after.aliases:
        return ()
    if keys is None:
        return {*before.entries, *after.entries}
    names = [key.removeprefix(ADAPTER) for key in keys if key.startswith(ADAPTER)]
    aliases = [key.removeprefix(ALIAS) for key in keys if key.startswith(ALIAS)]
    for table in (after.aliases, before.aliases):
        names += [table[alias].partition("@")[0] for alias in aliases if alias in table]
    return dict.fromkeys(names)


def _digests(entry: CatalogEntry | None) -> frozenset[str]:
    return frozenset() if entry is None else entry.digests


def _refuse() -> None:
    raise AdapterUnavailableError("There was no room for a record beside a blob.")
