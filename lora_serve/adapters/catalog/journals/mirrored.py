"""A shared journal with a local copy, which serves while the shared one is away and restores what that one lost.

Every commit has a name. A shared journal that lacks the last commit known here was started from an older state and went
on from there: a branch. Records that only this copy changed since the fork are restored; for records that both changed,
the journal's user decides (`Merge`), on the thread that asked for a commit or a page. "Ours" are this copy's.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from lora_serve.adapters.catalog.journals.base import Journal, Page, Position
from lora_serve.adapters.catalog.journals.sqlite import MAX_CHANGES, SqliteJournal
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.core.errors import AdapterUnavailableError, DamagedFileError

MAX_HEADS = 20_000  # names of commits that are kept; a replica that was away for longer counts as behind
_GONE = "gone:"  # prefix of the hash that stands for the key of a deleted record; no key begins so
_log = logging.getLogger(__name__)
Records = dict[str, str]
# From the records so far, and those that may have changed on both sides as (ours, theirs), to the merged records.
Merge = Callable[[Records, Mapping[str, tuple[str | None, str | None]]], Records]


class Mirror(SqliteJournal):
    """A follower: all that it has was acknowledged by the shared journal."""

    def replace(self, page: Page) -> None:
        """Become a copy of the shared journal at this page, which has all of its records.

        If the page is no successor of this copy, commit by commit, every record counts as changed.
        """
        with self._db.transaction():
            known = self._position()
            before = dict(self._db.execute("SELECT key, text FROM records"))
            # Where Redis lost the names of its commits, the very position known here still tells.
            is_in_line = page.position == known or page.heads.get(known.head) == known.generation
            changed = _differing(before, page.records) if is_in_line else before.keys() | page.records.keys()
            self._db.execute("DELETE FROM records")
            self._write(page.position, page.records)
            self._note_changed(page, changed)
            self._db.execute("DELETE FROM changes WHERE generation > ?", (page.position.generation,))
            if not is_in_line:  # else what led here led there
                self._db.execute("DELETE FROM heads")
            self._take(page)
        self._truncate()

    def apply(self, page: Page) -> None:
        """Follow the shared journal to this page of changed records."""
        with self._db.transaction():
            self._write(page.position, page.records)
            self._note_changed(page, page.records)
            self._take(page)
        if None in page.records.values():
            self._truncate()

    def heads(self) -> dict[str, int]:
        """The names of the commits that led here, with their generations. Raises AdapterUnavailableError."""
        return dict(self._db.select("SELECT head, abs(generation) FROM heads"))

    def changed_since(self, position: Position, there: Iterable[str]) -> frozenset[str] | None:
        """The keys of records that changed after `position`, which led here; None: unknown.

        The key of a deleted record is returned only if it is among the keys `there`.
        """
        generation = self._db.select("SELECT generation FROM position")[0][0]
        if generation - position.generation > MAX_CHANGES or position.generation < self._floor:
            return None
        rows = self._db.select("SELECT DISTINCT key FROM changes WHERE generation > ?", (position.generation,))
        noted = {row[0] for row in rows}
        return frozenset(key for key in noted if not key.startswith(_GONE)) | {
            key for key in there if _hash_of(key) in noted
        }

    def _note_changed(self, page: Page, keys: Iterable[str]) -> None:
        """Notes the changes; of a deleted record only the hash of its key, which may name a deleted tenant."""
        listed = list(keys)
        gone = [key for key in listed if page.records.get(key) is None]
        self._db.executemany("DELETE FROM changes WHERE key = ?", [(key,) for key in gone])
        here = [key for key in listed if page.records.get(key) is not None]
        self._note(page.position.generation, [*here, *map(_hash_of, gone)])

    def _take(self, page: Page) -> None:
        heads = {**page.heads, **({page.position.head: page.position.generation} if page.position.head else {})}
        self._db.executemany("INSERT OR REPLACE INTO heads VALUES (?, ?)", list(heads.items()))
        self._db.execute("DELETE FROM heads WHERE abs(generation) <= ?", (page.position.generation - MAX_HEADS,))


def open_mirror(path: Path, title: str = "adapter catalog", monitor: StoreMonitor | None = None) -> Mirror:
    """The local copy. A damaged one is set aside; the shared journal fills the new one. Raises ConfigError."""
    try:
        return Mirror(path, title, monitor)
    except DamagedFileError as error:
        try:
            _set_aside(path)
        except OSError:
            raise error from None
        _log.error("%s; it was set aside, and a new one is made of what Redis has", error)
        return Mirror(path, title, monitor)


def _hash_of(key: str) -> str:
    return _GONE + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _differing(before: Mapping[str, str], after: Mapping[str, str | None]) -> Iterable[str]:
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]


def _set_aside(path: Path) -> None:
    """Renames the file and what SQLite keeps beside it. Raises OSError."""
    path.replace(path.with_name(f"{path.name}.damaged"))
    for more in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + more).replace(path.with_name(f"{path.name}.damaged{more}"))


class MirroredJournal:
    """See Journal. The shared journal decides; the mirror only follows it."""

    def __init__(self, shared: Journal, mirror: Mirror, merge: Merge) -> None:
        self._shared = shared
        self._mirror = mirror
        self._merge = merge
        self._is_first = True
        self._is_behind = False  # the mirror could not be written and must be filled anew

    def load(self) -> Page:
        """Returns the mirror's page if the shared journal is away at the first call, and only then."""
        is_first, self._is_first = self._is_first, False
        try:
            page = self._restored(self._shared.load())
        except AdapterUnavailableError as error:
            if not is_first:
                raise
            _log.warning("%s Serving what is known here.", error)
            return self._mirror.load()
        self._follow(page, is_whole=True)
        return page

    def since(self, position: Position) -> Page | None:
        if self._is_behind:
            return None
        page = self._shared.since(position)
        if page is not None and page.position != position:
            self._follow(page)
        return page

    def commit(
        self,
        expected: Position,
        changes: Mapping[str, str | None],
        becomes: Position | None = None,
        heads: Mapping[str, int] | None = None,
    ) -> Position | None:
        position = self._shared.commit(expected, changes, becomes, heads)
        if position is not None:
            self._follow(Page(position, changes))
        return position

    def wait(self, position: Position, seconds: float) -> None:
        self._shared.wait(position, seconds)

    def forget(self) -> None:
        self._shared.forget()
        self._mirror.forget()

    def close(self) -> None:
        self._shared.close()
        self._mirror.close()

    def _follow(self, page: Page, is_whole: bool = False) -> None:
        """Writes a page into the mirror; a full disk must not stop what the shared journal has already done."""
        try:
            if is_whole:
                self._mirror.replace(page)
            elif not self._is_behind:
                self._mirror.apply(page)
        except AdapterUnavailableError as error:
            _log.warning("the copy of the shared registry cannot be kept: %s", error)
            self._is_behind = True
        else:
            self._is_behind = self._is_behind and not is_whole

    def _restored(self, page: Page) -> Page:
        """The shared journal's page, after what it had lost (by being emptied or set back) was restored."""
        known = self._mirror.load()
        epoch, heads = known.position.epoch, self._mirror.heads()
        if not _has_lost(page, known):
            if epoch not in ("", page.position.epoch) and known.position.head not in page.heads:
                _log.warning("the shared registry is another one than before; this store's copy of the old is dropped")
            return page
        there = page.records if page.position.epoch else {}  # without a position the commit drops what is left
        is_bare = page.position.epoch == "" or page.position == known.position  # nobody has committed since
        records = _texts(known) if is_bare else self._with_ours(page, known, heads)
        changes: dict[str, str | None] = {k: t for k, t in records.items() if there.get(k) != t}
        changes |= dict.fromkeys(there.keys() - records.keys())
        generation = max(known.position.generation, page.position.generation) + 1
        becomes = Position(epoch, generation, uuid.uuid4().hex)
        missing = {head: number for head, number in heads.items() if head not in page.heads}
        if self._shared.commit(page.position, changes, becomes, missing) is None:
            return self._restored(self._shared.load())  # another replica was first
        _log.warning("the shared registry had lost %d records; they were given back", len(changes))
        sign = -1 if page.position.epoch else 1
        return Page(becomes, records, {**{head: sign * number for head, number in missing.items()}, **page.heads})

    def _with_ours(self, page: Page, known: Page, heads: Mapping[str, int]) -> Records:
        """The records of both branches together."""
        fork = _fork_of(page, heads)
        ours = None if fork is None else self._mirror.changed_since(fork, page.records)
        since = None if fork is None else self._shared.since(fork)
        theirs = None if since is None or since.position != page.position else frozenset(since.records)
        if fork is None and not known.position.head and page.position.generation < known.position.generation:
            theirs = frozenset()  # an older lora_serve made commits without names: ours is newer
        records, contested = _texts(page), {}
        for key in known.records.keys() | page.records.keys() if ours is None else ours:
            our, their = known.records.get(key), page.records.get(key)
            if our == their:
                continue
            if theirs is None or key in theirs:
                contested[key] = (our, their)
            elif our is None:
                del records[key]
            else:
                records[key] = our
        return self._merge(records, contested)


def _has_lost(page: Page, known: Page) -> bool:
    """True if the shared journal lacks commits that are known here, as far as their names tell."""
    there, here = page.position, known.position
    if not here.epoch or not there.epoch:
        return bool(here.epoch)
    if there == here:
        return page.records != known.records
    if there.epoch != here.epoch or here.head in page.heads:
        return False
    if not here.head or not page.heads:
        return there.generation < here.generation
    return there.generation < here.generation or here.generation >= min(map(abs, page.heads.values()))


def _fork_of(page: Page, heads: Mapping[str, int]) -> Position | None:
    """The last common commit; None: unknown."""
    common = {head: number for head, number in page.heads.items() if number > 0 and head in heads}
    if not common:
        return None
    head = max(common, key=lambda name: common[name])
    return Position(page.position.epoch, common[head], head)


def _texts(page: Page) -> Records:
    return {key: text for key, text in page.records.items() if text is not None}
