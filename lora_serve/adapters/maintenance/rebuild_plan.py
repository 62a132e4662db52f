"""Plans a catalog from the records beside blobs and from the catalog that survived, which may be an older copy.

An id is taken as a whole from one source. The surviving catalog wins, except over records that were written after it;
an id that it deleted stays deleted. Among records the newest one of the newest catalog wins.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.catalog.blob_leases import CatalogHistory
from lora_serve.adapters.catalog.blob_records import BlobRecord, record_of
from lora_serve.adapters.catalog.catalog import find
from lora_serve.adapters.catalog.edits import without
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.state import CatalogState, Snapshot
from lora_serve.adapters.maintenance.copying import OnProgress
from lora_serve.adapters.stores.disk import content_bytes, is_sound
from lora_serve.adapters.stores.disk_tables import read_records

_OWN = ("blobs", "unnamed", "quarantine")
_COPIES = ("cache/blobs", "cache/unnamed", "cache/quarantine")
_NAME = re.compile(r"([0-9a-f]{64})(-[0-9-]+)?\Z")
Rank = tuple[int, float, int]  # a higher source wins


class SurvivingBlobs:
    """The folders of blobs that are left, by digest, and the records in them."""

    def __init__(
        self, store: Path | None, also: Sequence[Path], on_progress: OnProgress = lambda done, total: None
    ) -> None:
        """`store`: the one whose catalog is rebuilt; `also`: other stores, whose blobs are copies."""
        self._folders: dict[str, list[Path]] = {}
        self._sound: dict[str, Path | None] = {}
        self._on_progress = on_progress
        self._done = self._total = 0
        self.records = [] if store is None else self._take(store, _OWN)
        self.copies = [] if store is None else self._take(store, _COPIES)
        for other in also:
            self.copies += self._take(other, (*_OWN, *_COPIES))

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._folders)

    def sound(self, digest: str) -> Path | None:
        """A folder that has exactly the content of the digest; None if there is none."""
        if digest not in self._sound:
            folders = self._folders.get(digest, [])
            self._sound[digest] = next((folder for folder in folders if is_sound(folder, digest)), None)
            self._done += sum(map(_bytes_in, folders))
            self._on_progress(self._done, self._total)
        return self._sound[digest]

    def _take(self, store: Path, places: Sequence[str]) -> list[BlobRecord]:
        found = []
        for digest, folder in _blobs_in(store, places):
            self._folders.setdefault(digest, []).append(folder)
            self._total += _bytes_in(folder)
            found += [record for text in _records_in(folder) if (record := record_of(text)) is not None]
        return found


def _blobs_in(store: Path, places: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for place in places:
        if (store / place).is_dir():
            for path in sorted((store / place).iterdir()):
                if (named := _NAME.match(path.name)) and path.is_dir() and not path.is_symlink():
                    yield "sha256:" + named[1], path


def _records_in(folder: Path) -> list[str]:
    try:
        return list(read_records(folder).values())
    except OSError:
        return []


def _bytes_in(folder: Path) -> int:
    try:
        return content_bytes(folder)
    except OSError:
        return 0


class RebuildOutcome(enum.StrEnum):
    """The outcome of a rebuild for one id."""

    UNCHANGED = "unchanged"  # it is as in the surviving catalog
    CHANGED = "changed"  # a record is newer than the surviving catalog
    RESTORED = "restored"  # the surviving catalog lacked it
    LOST = "lost"  # none of its versions has an intact blob; nothing is written


@dataclass(frozen=True, slots=True)
class RebuiltId:
    """One id; `entry` None: it is lost. `missing`: versions left out, as `number (digest)`."""

    name: str
    outcome: RebuildOutcome
    entry: CatalogEntry | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """The planned catalog; `dropped_aliases` lead nowhere, or have the name of an id."""

    ids: tuple[RebuiltId, ...]
    aliases: Mapping[str, str]
    dropped_aliases: tuple[str, ...]

    @property
    def entries(self) -> dict[str, CatalogEntry]:
        return {one.name: one.entry for one in self.ids if one.entry is not None}

    def snapshot(self, position: Position) -> Snapshot:
        return Snapshot.of(position, self.entries, self.aliases)


@dataclass(frozen=True, slots=True)
class _Source:
    """One id in one source."""

    rank: Rank
    outcome: RebuildOutcome
    entry: CatalogEntry
    aliases: Mapping[str, str]


def plan_rebuild(
    survived: CatalogState | None,
    records: Iterable[BlobRecord],
    copies: Iterable[BlobRecord],
    is_sound: Callable[[str], bool],
) -> RebuildPlan:
    """Plan the catalog. `survived`: the catalog, if it can be read. `records`: those in its own store; `copies`: those
    in caches and other stores, which miss some deletions. `is_sound`: True if an intact blob exists.
    """
    state = survived or CatalogState()
    history = CatalogHistory(state)
    counted = [record for record in records if not history.was_deleted(record)]
    counted += [record for record in copies if not history.includes(record.position)]
    sources = _sources(state, counted)
    ids = tuple(_rebuilt(sources[name], is_sound) for name in sorted(sources))
    entries = {one.name: one.entry for one in ids if one.entry is not None}
    claimed: dict[str, str] = {}
    for source in sorted(sources.values(), key=lambda source: source.rank):
        claimed |= source.aliases
    snapshot = Snapshot.of(Position(), entries, {})
    aliases = {a: t for a, t in claimed.items() if a not in entries and find(snapshot, t, None, None)}
    free = state.snapshot.held - entries.keys() - claimed.keys() - sources.keys()
    ids += tuple(RebuiltId(name, RebuildOutcome.LOST, None) for name in sorted(free))
    return RebuildPlan(ids, aliases, tuple(sorted(claimed.keys() - aliases.keys())))


def _sources(state: CatalogState, records: list[BlobRecord]) -> dict[str, _Source]:
    """The best source of each id."""
    snapshot, history = state.snapshot, CatalogHistory(state)
    last: dict[str, float] = defaultdict(float)  # the time of each catalog's last record, by epoch
    for record in records:
        last[record.position.epoch] = max(last[record.position.epoch], record.time)
    found: dict[str, _Source] = {}
    for name, entry in snapshot.entries.items():
        aliases = snapshot.aliases_of(name)
        found[name] = _Source((1, 0.0, 0), RebuildOutcome.UNCHANGED, entry, aliases)
    for record in records:
        name, position = record.entry.name, record.position
        rank = (2 if history.is_ahead(record) else 0, last[position.epoch], position.generation)
        if name not in found or found[name].rank < rank:
            outcome = RebuildOutcome.CHANGED if name in snapshot.entries else RebuildOutcome.RESTORED
            found[name] = _Source(rank, outcome, record.entry, record.aliases)
    return found


def _rebuilt(source: _Source, is_sound: Callable[[str], bool]) -> RebuiltId:
    entry = source.entry
    gone = [version for version in entry.versions if not is_sound(version.digest)]
    missing = tuple(f"{version.version} ({version.digest})" for version in gone)
    if source.outcome is RebuildOutcome.UNCHANGED:  # keep versions whose blobs may come back
        return RebuiltId(entry.name, source.outcome, entry, missing)
    left = without(entry, gone) if gone else entry
    return RebuiltId(entry.name, source.outcome if left else RebuildOutcome.LOST, left, missing)
