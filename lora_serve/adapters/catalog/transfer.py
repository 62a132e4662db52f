"""Copies a registry into another: blobs first, each verified on its way, then the record that names them.

Every blob is held in the target from before its first byte until its id is written, in one commit with the id's
aliases. So a crash at any point leaves the target whole, and the same transfer again completes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.merging import Merge, Outcome, merge
from lora_serve.adapters.catalog.places import REPLICA, Address, Place, open_place
from lora_serve.adapters.catalog.soundness import Unsound, check_entry, is_readable
from lora_serve.adapters.catalog.state import CatalogState, Changes, noted
from lora_serve.adapters.checkpoint.digest import adapter_digest, content_names
from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.core.errors import AdapterUnavailableError

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all; the second is an estimate at first
GRACE = 1.5  # seconds that a blob in Redis outlives its name, so that servers that still use it can take their hold
_CHUNK_BYTES = 2**20
_HOLD_TRIES, _HOLD_PAUSE = 20, 0.05  # seconds


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one id; `reason` of a conflict or a refusal."""

    name: str
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all ids; `unreadable`: those of which the source's own record makes no sense."""

    lines: tuple[Line, ...]
    unreadable: tuple[str, ...]
    num_blobs: int  # copied
    num_bytes: int  # copied

    def named(self, outcome: Outcome) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.outcome is outcome)

    @property
    def is_whole(self) -> bool:
        """Whether the target now has everything."""
        return not (self.unreadable or self.named(Outcome.CONFLICT) or self.named(Outcome.REFUSED))


@contextmanager
def open_ends(source: Address, target: Address) -> Iterator[tuple[Place, Place]]:
    """Both registries, the target's holds named after the source. Raises ConfigError, AdapterUnavailableError."""
    with open_place(source, is_source=True) as first:
        # A second run knows by that name what a first one, which was killed, has left held.
        replica = f"{REPLICA}-{first.catalog.snapshot.position.epoch}"
        with open_place(target, is_source=False, replica=replica) as second:
            yield first, second


class Transfer:
    """One run of `run`. Ids that cannot be taken stop nothing."""

    def __init__(self, source: Place, target: Place, overwrite: bool, on_progress: OnProgress) -> None:
        """`overwrite`: the target's ids become what the source says, other versions go."""
        self._source, self._target = source, target
        self._overwrite = overwrite
        self._on_progress = on_progress
        snapshot = source.catalog.snapshot
        self._ahead = {v.digest: v.num_bytes for entry in snapshot.entries.values() for v in entry.versions}
        self._verified: set[str] = set()
        self._strays: set[str] = set()
        self._num_blobs = self._num_bytes = 0
        self._done = 0

    def run(self) -> Report:
        """Copy everything. Raises AdapterUnavailableError if one of the two fails; what is there then is whole."""
        snapshot = self._source.catalog.snapshot
        lines = [self._transfer(snapshot.entries[name]) for name in snapshot.names]
        self._clean()
        return Report(tuple(lines), self._source.unreadable, self._num_blobs, self._num_bytes)

    def _transfer(self, entry: CatalogEntry) -> Line:
        snapshot = self._source.catalog.snapshot
        aliases = {alias: snapshot.aliases[alias] for alias in snapshot.aliases_of(entry.name)}
        digests = list(dict.fromkeys(version.digest for version in entry.versions))
        try:
            check_entry(entry, aliases)
            done = self._merge(entry, aliases, digests)
        except Unsound as error:
            return Line(entry.name, Outcome.REFUSED, str(error))
        finally:
            for digest in digests:
                self._advance(self._ahead.pop(digest, 0))
        return Line(entry.name, done.outcome, done.reason)

    def _merge(self, entry: CatalogEntry, aliases: Mapping[str, str], digests: list[str]) -> Merge:
        planned = merge(self._target.catalog.snapshot, entry, aliases, self._overwrite)
        if planned.outcome is Outcome.CONFLICT:
            return planned
        is_quick = not planned.is_written and not self._overwrite
        needed = [digest for digest in digests if not self._is_in_target(digest, is_quick)]
        if not planned.is_written and not needed:
            return planned
        self._check_source(entry, needed)
        with self._held(digests) as holders:
            for digest in digests:
                if not self._is_in_target(digest, is_quick):
                    self._copy(digest)
            return self._write(entry, aliases, holders)

    def _check_source(self, entry: CatalogEntry, digests: list[str]) -> None:
        for digest in digests:
            if not self._source.store.has(digest):
                raise self._missing(entry, digest)

    def _missing(self, entry: CatalogEntry, digest: str) -> Unsound:
        self._source.catalog.refresh()
        if self._source.catalog.snapshot.entries.get(entry.name) != entry:
            return Unsound("a server changed it meanwhile; run this again")
        return Unsound(f"the source lacks the blob {digest}")

    def _is_in_target(self, digest: str, is_quick: bool) -> bool:
        """Whether the target has it, and, unless `is_quick`, all its bytes are right."""
        store = self._target.store
        if not store.has(digest):
            return False
        if not is_quick and digest not in self._verified:
            if not is_readable(store, digest):
                return False
            self._verified.add(digest)
        return True

    def _copy(self, digest: str) -> None:
        """Raises Unsound if the source's bytes are not what `digest` names."""
        with scratch_folder(self._target.tmp) as scratch:
            num_bytes = self._fetch(digest, scratch)
            if self._target.store.has(digest):  # and it is broken there
                self._target.store.delete(digest)
            self._target.store.put(digest, scratch)
        self._verified.add(digest)
        self._num_blobs, self._num_bytes = self._num_blobs + 1, self._num_bytes + num_bytes

    def _fetch(self, digest: str, scratch: Path) -> int:
        self._ahead.pop(digest, None)
        try:
            with self._source.store.open(digest) as folder:
                num_bytes = sum(self._copy_file(folder / name, scratch / name) for name in content_names(folder))
            if adapter_digest(scratch) != digest:
                raise Unsound(f"the source's blob {digest} is corrupt")
        except AdapterUnavailableError:
            self._source.store.has(digest)  # raises if it is the whole store that is away
            raise Unsound(f"the source's blob {digest} cannot be read") from None
        except OSError as error:
            raise AdapterUnavailableError(f"a blob cannot be copied: {error.strerror or error}.") from None
        return num_bytes

    def _copy_file(self, source: Path, target: Path) -> int:
        num_bytes = 0
        with target.open("wb") as file:
            for chunk in _chunks(source):
                file.write(chunk)
                num_bytes += len(chunk)
                self._advance(len(chunk))
        return num_bytes

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._on_progress(self._done, self._done + sum(self._ahead.values()))

    @contextmanager
    def _held(self, digests: list[str]) -> Iterator[dict[str, str]]:
        """A hold of each blob, by digest; what is not named when the block ends does not stay."""
        holders: dict[str, str] = {}
        try:
            for digest in digests:
                holders[digest] = self._hold(digest)
            yield holders
        finally:
            with suppress(AdapterUnavailableError):  # the next run, or a server's start, ends them
                for digest, holder in holders.items():
                    self._collect(digest, holder)

    def _hold(self, digest: str) -> str:
        """Wait a moment for a deletion of the same bytes to end."""
        for _ in range(_HOLD_TRIES):
            with suppress(AdapterUnavailableError):
                return self._target.catalog.holds.take(digest)
            time.sleep(_HOLD_PAUSE)
        return self._target.catalog.holds.take(digest)

    def _write(self, entry: CatalogEntry, aliases: Mapping[str, str], holders: Mapping[str, str]) -> Merge:
        def edit(state: CatalogState) -> tuple[Changes, Merge]:
            done = merge(state.snapshot, entry, aliases, self._overwrite)
            if not done.is_written:
                return {}, done
            changes = dict(done.changes)
            for digest, holder in holders.items():
                note = state.note(digest)
                if holder not in note.holders:  # another run of the same transfer took it for a dead one's
                    raise AdapterUnavailableError("Another transfer is under way; run this again when it has ended.")
                changes |= noted(digest, note.without(holder))
            for digest in done.strays:
                changes |= noted(digest, state.note(digest).held_by(self._target.catalog.holds.drainer, time.time()))
            return changes, done

        done = self._target.catalog.change(edit)
        self._strays |= done.strays
        return done

    def _collect(self, digest: str, holder: str) -> None:
        """End a hold; delete the blob unless a version names it or somebody else holds it."""
        holds = self._target.catalog.holds
        if digest in self._target.catalog.snapshot.digests and holder not in self._holders(digest):
            return  # ended by the commit that named it
        if holds.condemn(digest, holder):
            self._verified.discard(digest)
            self._target.store.delete(digest)
            holds.forget(digest)

    def _holders(self, digest: str) -> frozenset[str]:
        return self._target.catalog.change(lambda state: ({}, frozenset(state.note(digest).holders)))

    def _clean(self) -> None:
        """End what this run, and one before it that was killed, still hold: the blobs of overwritten versions."""
        holds = self._target.catalog.holds
        if self._strays and self._target.catalog.is_shared:
            time.sleep(GRACE)
        left = {digest: holder for digest, holder in holds.leftovers().items() if holder}
        for digest, holder in (left | dict.fromkeys(self._strays, holds.drainer)).items():
            self._collect(digest, holder)


def _chunks(path: Path) -> Iterator[bytes]:
    """Raises Unsound for a file that is missing or cannot be read."""
    try:
        if not path.is_file():
            raise Unsound(f"the source's blob {path.parent.name} lacks {path.name}")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise Unsound(f"the source's {path.name} cannot be read: {error.strerror}") from None
