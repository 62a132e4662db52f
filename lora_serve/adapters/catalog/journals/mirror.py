"""The local copy of a shared journal: its records and the commits that led to them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.journals.sqlite import MAX_CHANGES, SqliteJournal
from lora_serve.adapters.stores.monitor import StoreMonitor
from lora_serve.core.errors import DamagedFileError

MAX_HEADS = 20_000  # names of commits that are kept; a replica that was away for longer counts as behind
_GONE = "gone:"  # prefix of the hash that stands for the key of a deleted record; no key begins so
_log = logging.getLogger(__name__)


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
