"""Copies a registry into another: blobs first, each verified on its way, then the record that names them.

Every blob is leased in the target from before its first byte until its id is written, in one commit with the id's
aliases. So a crash at any point leaves the target whole, and repeating the transfer completes it.

An export's target is a folder with the registry alone: no lock, no name of a server, no key. While an export is not
complete the folder has the file MARK; without it, a folder that is not empty is not touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.state import CatalogState, lease_change
from lora_serve.adapters.maintenance.blob_copier import BlobCopier, OnProgress
from lora_serve.adapters.maintenance.integrity import NotCopyableError, check_entry
from lora_serve.adapters.maintenance.merging import Merge, MergeOutcome, merge
from lora_serve.adapters.maintenance.registries import (
    REPLICA,
    OpenRegistry,
    RegistryAddress,
    claim_folder,
    open_registry,
)
from lora_serve.adapters.stores.files import flush
from lora_serve.core.errors import AdapterUnavailableError

MARK = "export.incomplete"
GRACE = 1.5  # seconds that a blob in Redis outlives its last name, so that servers that still use it can lease it


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

    def _merge(self, entry: CatalogEntry, aliases: Mapping[str, str], digests: list[str]) -> Merge:
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

    def _write(self, entry: CatalogEntry, aliases: Mapping[str, str], holders: Mapping[str, str]) -> Merge:
        def edit(state: CatalogState) -> tuple[Changes, Merge]:
            done = merge(state.snapshot, entry, aliases, self._overwrite)
            return (self._changes(state, done, holders) if done.is_written else {}), done

        return self._target.catalog.change(edit)

    def _changes(self, state: CatalogState, done: Merge, holders: Mapping[str, str]) -> Changes:
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
        holders = self._target.catalog.change(lambda state: ({}, state.lease_on(digest).holders))
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
