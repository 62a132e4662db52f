"""Copies a registry into another: blobs first, each verified on its way, then the record that names them.

Every blob is held in the target from before its first byte until its id is written, in one commit with the id's
aliases. So a crash at any point leaves the target whole, and the same transfer again completes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.state import CatalogState, lease_change
from lora_serve.adapters.maintenance.blob_copier import BlobCopier, OnProgress
from lora_serve.adapters.maintenance.exports import mark
from lora_serve.adapters.maintenance.integrity import NotCopyableError, check_entry
from lora_serve.adapters.maintenance.merging import Merge, MergeOutcome, merge
from lora_serve.adapters.maintenance.registries import REPLICA, OpenRegistry, RegistryAddress, open_registry
from lora_serve.core.errors import AdapterUnavailableError

GRACE = 1.5  # seconds that a blob in Redis outlives its name, so that servers that still use it can take their hold


@dataclass(frozen=True, slots=True)
class TransferredId:
    """What became of one id; `reason` of a conflict or a refusal."""

    name: str
    outcome: MergeOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What became of all ids; `unreadable`: those of which the source's own record makes no sense."""

    lines: tuple[TransferredId, ...]
    unreadable: tuple[str, ...]
    num_blobs: int  # copied
    num_bytes: int  # copied

    def named(self, outcome: MergeOutcome) -> tuple[TransferredId, ...]:
        return tuple(line for line in self.lines if line.outcome is outcome)

    @property
    def is_whole(self) -> bool:
        """Whether the target now has everything."""
        return not (self.unreadable or self.named(MergeOutcome.CONFLICT) or self.named(MergeOutcome.REFUSED))


@contextmanager
def open_ends(
    source: RegistryAddress, target: RegistryAddress, is_export: bool = False
) -> Iterator[tuple[OpenRegistry, OpenRegistry]]:
    """Both registries. `is_export`: the target is a folder that is to hold nothing else.

    Raises ConfigError, AdapterUnavailableError.
    """
    with open_registry(source, is_source=True) as first:
        if is_export:
            mark(target)
        # By this name a second run knows what a first one, which was killed, has left held.
        replica = f"{REPLICA}-{first.catalog.snapshot.position.epoch}"
        with open_registry(target, is_source=False, replica=replica) as second:
            yield first, second


class Transfer:
    """One run. Ids that cannot be taken stop nothing."""

    def __init__(self, source: OpenRegistry, target: OpenRegistry, overwrite: bool, on_progress: OnProgress) -> None:
        """`overwrite`: the target's ids become what the source says, other versions go."""
        self._source, self._target = source, target
        self._snapshot = source.catalog.snapshot
        self._leases = target.catalog.leases
        self._overwrite = overwrite
        sizes = {v.digest: v.num_bytes for entry in self._snapshot.entries.values() for v in entry.versions}
        self._blobs = BlobCopier(source.store, target.store, target.tmp, sizes, on_progress)

    def run(self) -> TransferReport:
        """Copy everything. Raises AdapterUnavailableError if one of the two fails; what is there then is whole."""
        lines = [self._transfer(self._snapshot.entries[name]) for name in self._snapshot.names]
        self._clean()
        return TransferReport(tuple(lines), self._source.unreadable, self._blobs.num_blobs, self._blobs.num_bytes)

    def _transfer(self, entry: CatalogEntry) -> TransferredId:
        aliases = {alias: self._snapshot.aliases[alias] for alias in self._snapshot.aliases_of(entry.name)}
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
        with self._held(digests) as holders:
            for digest in digests:
                if not self._blobs.is_there(digest, is_quick):  # asked again, now that it is held
                    self._blobs.copy(digest)
            return self._write(entry, aliases, holders)

    def _missing(self, entry: CatalogEntry, digest: str) -> NotCopyableError:
        self._source.catalog.refresh()
        if self._source.catalog.snapshot.entries.get(entry.name) != entry:
            return NotCopyableError("a server changed it meanwhile; run this again")
        return NotCopyableError(f"the source lacks the blob {digest}")

    @contextmanager
    def _held(self, digests: list[str]) -> Iterator[dict[str, str]]:
        """A hold of each blob, by digest; what is not named when the block ends does not stay."""
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
        """With the holds: of what is named now they end, what nothing names any more is held until `_clean`."""
        changes = dict(done.changes)
        for digest, holder in holders.items():
            note = state.leases_on(digest)
            if holder not in note.holders:  # another run of this transfer took it for a dead one's
                raise AdapterUnavailableError("The same transfer is under way elsewhere; run this again afterwards.")
            changes |= lease_change(digest, note.without(holder))
        for digest in done.strays:
            changes |= lease_change(digest, state.leases_on(digest).with_holder(self._leases.drain_holder, time.time()))
        return changes

    def _collect(self, digest: str, holder: str) -> None:
        """End a hold, if it has not ended; delete the blob unless a version names it or somebody else holds it."""
        holders = self._target.catalog.change(lambda state: ({}, state.leases_on(digest).holders))
        if holder in holders and self._leases.release(digest, holder):
            self._blobs.forget(digest)
            try:
                self._target.store.delete(digest)
                self._leases.deleted(digest)
            except BaseException:
                self._leases.deletion_failed(digest)
                raise

    def _clean(self) -> None:
        """Free the blobs of overwritten versions, and what a run before this one, which was killed, left held."""
        left = {digest: holder for digest, holder in self._leases.expired().items() if holder}
        if self._target.catalog.is_shared and self._leases.drain_holder in left.values():
            time.sleep(GRACE)
        for digest, holder in left.items():
            self._collect(digest, holder)
