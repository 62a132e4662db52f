"""Copies a registry into another: blobs first, each verified on its way, then the record that names them.

Every blob is leased in the target from before its first byte until its id is written, in one commit with the id's
aliases. So a crash at any point leaves the target whole, and repeating the transfer completes it.

An export's target is a folder with the registry alone: no lock, no name of a server, no key. While an export is not
complete the folder has the file MARK; without it, a folder that is not empty is not touched.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.state import ALIAS, CatalogState, Snapshot, lease_change, saved
from lora_serve.adapters.maintenance.copying import BlobCopier, OnProgress
from lora_serve.adapters.maintenance.registries import (
    REPLICA,
    NotCopyableError,
    OpenRegistry,
    RegistryAddress,
    check_entry,
    claim_folder,
    open_registry,
)
from lora_serve.adapters.stores.files import flush
from lora_serve.core.errors import AdapterUnavailableError

MARK = "export.incomplete"
GRACE = 1.5  # seconds that a blob in Redis outlives its last name, so that servers that still use it can lease it


class MergeOutcome(enum.StrEnum):
    """The outcome of a transfer for one id."""

    MADE = "made"  # the target did not have it
    OVERWRITTEN = "overwritten"  # the target had it; now it is as in the source
    UNCHANGED = "unchanged"  # the target had it with the same versions
    CONFLICT = "conflict"  # the target has a different one; nothing was written
    REFUSED = "refused"  # the source's record or blobs are broken; nothing was written


@dataclass(frozen=True, slots=True)
class IdMerge:
    """`reason` of a conflict. `strays`: digests that no version names once `changes` are made."""

    outcome: MergeOutcome
    reason: str = ""
    changes: Changes = field(default_factory=dict)
    strays: frozenset[str] = frozenset()

    @property
    def is_written(self) -> bool:
        return self.outcome in (MergeOutcome.MADE, MergeOutcome.OVERWRITTEN)


def merge(snapshot: Snapshot, entry: CatalogEntry, aliases: Mapping[str, str], overwrite: bool) -> IdMerge:
    """IdMerge `entry` and its aliases (name -> target) into the registry of `snapshot`.

    Without `overwrite` an id of the same versions is unchanged, whatever its route, pin, metadata and aliases are.
    """
    old = snapshot.entries.get(entry.name)
    if old is not None and _is_there(snapshot, old, entry, aliases, overwrite):
        return IdMerge(MergeOutcome.UNCHANGED)
    reason = _blocked(snapshot, entry, aliases) or ("" if overwrite else _contradiction(snapshot, entry, aliases))
    if reason:
        return IdMerge(MergeOutcome.CONFLICT, reason)
    outcome = MergeOutcome.MADE if old is None else MergeOutcome.OVERWRITTEN
    return IdMerge(outcome, "", _changes(snapshot, entry, aliases), _strays(snapshot, entry))


def _is_there(
    snapshot: Snapshot, old: CatalogEntry, entry: CatalogEntry, aliases: Mapping[str, str], overwrite: bool
) -> bool:
    if overwrite:
        return old == entry and snapshot.aliases_of(entry.name) == aliases
    return old.tenant == entry.tenant and _contents(old) == _contents(entry)


def _blocked(snapshot: Snapshot, entry: CatalogEntry, aliases: Mapping[str, str]) -> str:
    """The reason why not even overwriting is possible: it would remove another id, or what cannot be read."""
    if held := sorted(snapshot.held & {entry.name, *aliases}):
        return f"the record of `{held[0]}` there cannot be read"
    taken = sorted(alias for alias in aliases if alias in snapshot.entries)
    return f"its alias `{taken[0]}` is an adapter's id there" if taken else ""


def _contradiction(snapshot: Snapshot, entry: CatalogEntry, aliases: Mapping[str, str]) -> str:
    old = snapshot.entries.get(entry.name)
    if old is not None and old.tenant != entry.tenant:
        return f"it belongs to the tenant `{old.tenant}` there, to `{entry.tenant}` in the source"
    if old is not None:
        return f"it has {_numbers(old, entry)} there, {_numbers(entry, old)} in the source"
    if entry.name in snapshot.aliases:
        return f"the name is an alias of `{snapshot.aliases[entry.name]}` there"
    moved = sorted(alias for alias, target in aliases.items() if snapshot.aliases.get(alias, target) != target)
    return f"its alias `{moved[0]}` leads to `{snapshot.aliases[moved[0]]}` there" if moved else ""


def _changes(snapshot: Snapshot, entry: CatalogEntry, aliases: Mapping[str, str]) -> Changes:
    gone = snapshot.aliases_of(entry.name).keys() - aliases.keys() | snapshot.aliases.keys() & {entry.name}
    changes: Changes = {ALIAS + alias: None for alias in sorted(gone)}
    return changes | {ALIAS + alias: target for alias, target in aliases.items()} | saved(entry)


def _strays(snapshot: Snapshot, entry: CatalogEntry) -> frozenset[str]:
    old = snapshot.entries.get(entry.name)
    if old is None:
        return frozenset()
    others = (entry, *(other for other in snapshot.entries.values() if other is not old))
    return frozenset(_contents(old).values()) - {digest for other in others for digest in _contents(other).values()}


def _contents(entry: CatalogEntry) -> dict[int, str]:
    return {version.version: version.digest for version in entry.versions}


def _numbers(entry: CatalogEntry, other: CatalogEntry) -> str:
    """The versions of `entry` that `other` lacks, for messages."""
    found = sorted(_contents(entry).items() - _contents(other).items())
    names = ", ".join(f"{number} ({digest[:19]})" for number, digest in found[:4])
    if not found:
        return "no version of its own"
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"version{'s' if len(found) > 1 else ''} {names}{more}"


@dataclass(frozen=True, slots=True)
class TransferredId:
    """The outcome for one id, with the reason of a conflict or a refusal."""

    name: str
    outcome: MergeOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The outcome for all ids; `unreadable`: ids whose record in the source cannot be read."""

    lines: tuple[TransferredId, ...]
    unreadable: tuple[str, ...]
    num_blobs: int  # copied
    num_bytes: int  # copied

    def named(self, outcome: MergeOutcome) -> tuple[TransferredId, ...]:
        return tuple(line for line in self.lines if line.outcome is outcome)

    @property
    def is_whole(self) -> bool:
        """True if the target now has everything."""
        return not (self.unreadable or self.named(MergeOutcome.CONFLICT) or self.named(MergeOutcome.REFUSED))


@contextmanager
def open_ends(
    source: RegistryAddress, target: RegistryAddress, is_export: bool = False
) -> Iterator[tuple[OpenRegistry, OpenRegistry]]:
    """Open both registries. `is_export`: the target is a folder for this registry alone.

    Raises ConfigError, AdapterUnavailableError.
    """
    with open_registry(source, is_source=True) as first:
        if is_export:
            claim_folder(target.folder, MARK, target.flag)
        # By this name a second run finds the leases of a first one that was killed.
        replica = f"{REPLICA}-{first.catalog.snapshot.position.epoch}"
        with open_registry(target, is_source=False, replica=replica) as second:
            yield first, second


class Transfer:
    """One run. An id that cannot be copied does not stop it."""

    def __init__(self, source: OpenRegistry, target: OpenRegistry, overwrite: bool, on_progress: OnProgress) -> None:
        """`overwrite`: the target's ids become as in the source; their other versions are removed."""
        self._source, self._target = source, target
        self._snapshot = source.catalog.snapshot
        self._leases = target.catalog.leases
        self._overwrite = overwrite
        self._blobs = BlobCopier(source.store, target.store, target.tmp, self._snapshot.sizes, on_progress)

    def run(self) -> TransferReport:
        """Copy everything. Raises AdapterUnavailableError if a registry fails; the target is consistent even then."""
        lines = [self._transfer(self._snapshot.entries[name]) for name in self._snapshot.names]
        self._clean()
        return TransferReport(tuple(lines), self._source.unreadable, self._blobs.num_blobs, self._blobs.num_bytes)

    def _transfer(self, entry: CatalogEntry) -> TransferredId:
        aliases = self._snapshot.aliases_of(entry.name)
        digests = list(dict.fromkeys(version.digest for version in entry.versions))
        try:
            check_entry(entry, aliases)
            done = self._merge(entry, aliases, digests)
        except NotCopyableError as error:
            return TransferredId(entry.name, MergeOutcome.REFUSED, str(error))
        finally:
            for digest in digests:
                self._blobs.pass_over(digest)
        return TransferredId(entry.name, done.outcome, done.reason)

    def _merge(self, entry: CatalogEntry, aliases: Mapping[str, str], digests: list[str]) -> IdMerge:
        planned = merge(self._target.catalog.snapshot, entry, aliases, self._overwrite)
        if planned.outcome is MergeOutcome.CONFLICT:
            return planned
        is_quick = not planned.is_written and not self._overwrite
        needed = [digest for digest in digests if not self._blobs.is_there(digest, is_quick)]
        if not planned.is_written and not needed:
            return planned
        for digest in needed:
            if not self._source.store.has(digest):
                raise self._missing(entry, digest)
        with self._leased(digests) as holders:
            for digest in digests:
                if not self._blobs.is_there(digest, is_quick):  # asked again, now that it is leased
                    self._blobs.copy(digest)
            return self._write(entry, aliases, holders)

    def _missing(self, entry: CatalogEntry, digest: str) -> NotCopyableError:
        self._source.catalog.refresh()
        if self._source.catalog.snapshot.entries.get(entry.name) != entry:
            return NotCopyableError("a server changed it meanwhile; run this again")
        return NotCopyableError(f"the source lacks the blob {digest}")

    @contextmanager
    def _leased(self, digests: list[str]) -> Iterator[dict[str, str]]:
        """Leases on the blobs, as holders by digest; blobs that are not named when the block ends are freed."""
        holders: dict[str, str] = {}
        try:
            for digest in digests:
                holders[digest] = self._leases.acquire(digest)
            yield holders
        finally:
            with suppress(AdapterUnavailableError):  # the next run ends them
                for digest, holder in holders.items():
                    self._collect(digest, holder)

    def _write(self, entry: CatalogEntry, aliases: Mapping[str, str], holders: Mapping[str, str]) -> IdMerge:
        def edit(state: CatalogState) -> tuple[Changes, IdMerge]:
            done = merge(state.snapshot, entry, aliases, self._overwrite)
            return (self._changes(state, done, holders) if done.is_written else {}), done

        return self._target.catalog.ledger.change(edit)

    def _changes(self, state: CatalogState, done: IdMerge, holders: Mapping[str, str]) -> Changes:
        """A merge's changes; leases on named blobs end, blobs that lose their names are leased until `_clean`."""
        changes = dict(done.changes)
        for digest, holder in holders.items():
            lease = state.lease_on(digest)
            if holder not in lease.holders:  # another run of this transfer took it for a dead one's
                raise AdapterUnavailableError("The same transfer is under way elsewhere; run this again afterwards.")
            changes |= lease_change(digest, lease.without(holder))
        for digest in done.strays:
            changes |= state.leased_by(self._leases.drain_holder, digest, time.time())
        return changes

    def _collect(self, digest: str, holder: str) -> None:
        """Ends a lease, if it has not ended; deletes the blob unless a version names it or somebody else leases it."""
        holders = self._target.catalog.ledger.change(lambda state: ({}, state.lease_on(digest).holders))
        if holder in holders and self._leases.release(digest, holder):
            self._blobs.forget(digest)
            self._leases.delete(digest, self._target.store)

    def _clean(self) -> None:
        """Frees the blobs of overwritten versions, and those that a killed earlier run left leased."""
        left = [lease for lease in self._leases.expired(self._target.catalog.ledger.state) if lease[1]]
        if self._target.catalog.is_shared and self._leases.drain_holder in {holder for _, holder in left}:
            time.sleep(GRACE)
        for digest, holder in left:
            self._collect(digest, holder)


def is_unfinished(folder: Path) -> bool:
    """True if an export into the folder broke off, or could not take everything."""
    return (folder / MARK).is_file()


def finish_export(target: OpenRegistry) -> None:
    """Mark the export as complete. Raises OSError."""
    folder = target.address.folder
    target.tmp.rmdir()
    (folder / "lock").unlink()  # while it is locked: a later process makes a new file
    (folder / MARK).unlink()
    flush(folder)
