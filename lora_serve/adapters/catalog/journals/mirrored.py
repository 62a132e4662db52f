"""A shared journal with a local copy: what was heard of it is known even while it is away, and can be given back to
one that has forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lora_serve.adapters.catalog.journals.base import Journal, Page, Position
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.stores.monitor import StoreMonitor
from lora_serve.core.errors import AdapterUnavailableError, DamagedFileError

_log = logging.getLogger(__name__)


def open_mirror(path: Path, title: str = "adapter catalog", monitor: StoreMonitor | None = None) -> SqliteJournal:
    """The local copy; one that is damaged is set aside, and the new one filled by the shared journal.

    Raises ConfigError.
    """
    try:
        return SqliteJournal(path, title, monitor)
    except DamagedFileError as error:
        try:
            _set_aside(path)
        except OSError:
            raise error from None
        _log.error("%s; it was set aside, and a new one is made of what Redis has", error)
        return SqliteJournal(path, title, monitor)


def _set_aside(path: Path) -> None:
    """With what SQLite keeps beside it. Raises OSError."""
    path.replace(path.with_name(f"{path.name}.damaged"))
    for more in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + more).replace(path.with_name(f"{path.name}.damaged{more}"))


class MirroredJournal:
    """See Journal. The shared one decides; the mirror only follows, so that what it holds was acknowledged there."""

    def __init__(self, shared: Journal, mirror: SqliteJournal) -> None:
        self._shared = shared
        self._mirror = mirror
        self._is_first = True
        self._is_behind = False  # the mirror could not be written: it is to be made anew

    def load(self) -> Page:
        """See Journal. At the first call, and only then, the mirror's page while the shared journal is away."""
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
        """See Journal."""
        if self._is_behind:
            return None
        page = self._shared.since(position)
        if page is not None and page.records:
            self._follow(page)
        return page

    def commit(
        self, expected: Position, changes: Mapping[str, str | None], becomes: Position | None = None
    ) -> Position | None:
        """See Journal."""
        position = self._shared.commit(expected, changes, becomes)
        if position is not None:
            self._follow(Page(position, changes))
        return position

    def wait(self, position: Position, seconds: float) -> None:
        """See Journal."""
        self._shared.wait(position, seconds)

    def forget(self) -> None:
        """See Journal."""
        self._shared.forget()
        self._mirror.forget()

    def close(self) -> None:
        """See Journal."""
        self._shared.close()
        self._mirror.close()

    def _follow(self, page: Page, is_whole: bool = False) -> None:
        """Write it into the mirror; a disk that is full must not stop what the shared journal has already done."""
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
        """The shared journal's page, after it was given back what it had and lost: emptied, or set back in time."""
        known = self._mirror.load()
        is_emptied = not page.position.epoch and bool(known.position.epoch)
        is_older = page.position.epoch == known.position.epoch and page.position.generation < known.position.generation
        if not is_emptied and not is_older:
            if known.position.epoch not in ("", page.position.epoch):
                _log.warning("the shared registry is another one than before; this store's copy of the old is dropped")
            return page
        there = {} if is_emptied else page.records  # without a position, what is left is dropped by the commit
        changes = {key: text for key, text in known.records.items() if there.get(key) != text}
        changes |= dict.fromkeys(there.keys() - known.records.keys())
        again = Position(known.position.epoch, known.position.generation + 1)
        if self._shared.commit(page.position, changes, again) is None:
            return self._restored(self._shared.load())  # another replica was first
        _log.warning("the shared registry had lost %d records; they were given back", len(changes))
        return Page(again, known.records)
