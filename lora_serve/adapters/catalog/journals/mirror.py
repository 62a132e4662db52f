"""The local copy of a shared journal: its records, and what is known of how it came to them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.catalog.journals.sqlite_schema import MAX_CHANGES
from lora_serve.adapters.stores.monitor import StoreMonitor
from lora_serve.core.errors import DamagedFileError

MAX_HEADS = 20_000  # commits whose names are kept: whoever was away for longer is believed to be behind
_log = logging.getLogger(__name__)


class Mirror(SqliteJournal):
    """Follows only; what it holds was acknowledged by the shared journal."""

    def replace(self, page: Page) -> None:
        """Become a copy of the shared journal at this page, which holds all of its records.

        Where that did not come from here commit by commit, any record may have changed in between.
        """
        with self._db.transaction():
            known = self._position()
            before = dict(self._db.execute("SELECT key, text FROM records"))
            is_in_line = page.heads.get(known.head) == known.generation
            changed = _differing(before, page.records) if is_in_line else before.keys() | page.records.keys()
            self._db.execute("DELETE FROM records")
            self._write(page.position, page.records)
            self._note(page.position.generation, changed)
            self._db.execute("DELETE FROM changes WHERE generation > ?", (page.position.generation,))
            self._db.execute("DELETE FROM heads")
            self._take(page)
        self._truncate()

    def apply(self, page: Page) -> None:
        """Follow the shared journal to this page, whose records changed there."""
        with self._db.transaction():
            self._write(page.position, page.records)
            self._note(page.position.generation, page.records)
            self._take(page)
        if None in page.records.values():
            self._truncate()

    def heads(self) -> dict[str, int]:
        """Names of the commits that led here, with their generations. Raises AdapterUnavailableError."""
        return dict(self._db.select("SELECT head, abs(generation) FROM heads"))

    def changed_since(self, position: Position) -> frozenset[str] | None:
        """Keys of records that changed after `position`, which led here; None: that is not known any more."""
        generation = self._db.select("SELECT generation FROM position")[0][0]
        if generation - position.generation > MAX_CHANGES or position.generation < self._floor:
            return None
        rows = self._db.select("SELECT DISTINCT key FROM changes WHERE generation > ?", (position.generation,))
        return frozenset(row[0] for row in rows)

    def _take(self, page: Page) -> None:
        heads = {**page.heads, **({page.position.head: page.position.generation} if page.position.head else {})}
        self._db.executemany("INSERT OR REPLACE INTO heads VALUES (?, ?)", list(heads.items()))
        self._db.execute("DELETE FROM heads WHERE abs(generation) <= ?", (page.position.generation - MAX_HEADS,))


def open_mirror(path: Path, title: str = "adapter catalog", monitor: StoreMonitor | None = None) -> Mirror:
    """The local copy; one that is damaged is set aside, and the new one filled by the shared journal.

    Raises ConfigError.
    """
    try:
        return Mirror(path, title, monitor)
    except DamagedFileError as error:
        try:
            _set_aside(path)
        except OSError:
            raise error from None
        _log.error("%s; it was set aside, and a new one is made of what Redis has", error)
        return Mirror(path, title, monitor)


def _differing(before: Mapping[str, str], after: Mapping[str, str | None]) -> Iterable[str]:
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]


def _set_aside(path: Path) -> None:
    """With what SQLite keeps beside it. Raises OSError."""
    path.replace(path.with_name(f"{path.name}.damaged"))
    for more in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + more).replace(path.with_name(f"{path.name}.damaged{more}"))
