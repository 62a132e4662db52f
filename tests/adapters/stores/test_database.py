"""A database on a disk that cannot be written: what was acknowledged is read, and it is opened for writing later."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.adapters.stores import database
from lora_serve.adapters.stores.database import Database, Schema, made_by
from lora_serve.adapters.stores.files import StoreMonitor, lock_store
from lora_serve.core.errors import ConfigError, StoreUnwritableError
from tests.faults.small_disks import SmallDisk

SCHEMA = Schema(1, made_by("CREATE TABLE numbers (x INTEGER)"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "small")
    yield disk
    disk.close()


def opened(path: Path, monitor: StoreMonitor | None = None) -> Database:
    return Database(path, SCHEMA, "list of numbers", monitor)


def add(database: Database, number: int) -> None:
    with database.transaction():
        database.execute("INSERT INTO numbers VALUES (?)", (number,))


def numbers(database: Database) -> list[int]:
    return [row[0] for row in database.select("SELECT x FROM numbers ORDER BY x")]


def with_numbers(folder: Path, how: str) -> Path:
    """A file with 1, 2, 3, of a process that closed it or was killed; perhaps without the log's index."""
    path = folder / "numbers.sqlite3"
    with closing(opened(path)) as live:
        for number in (1, 2, 3):
            add(live, number)
        kept = {file: file.read_bytes() for file in folder.iterdir()}
    if how != "closed":
        for file, content in kept.items():
            if how == "killed" or not file.name.endswith("-shm"):
                file.write_bytes(content)
        assert path.with_name(path.name + "-wal").stat().st_size
    return path


@pytest.mark.parametrize("hindrance", ["full", "read_only"])
@pytest.mark.parametrize("how", ["closed", "killed", "killed, index lost"])
def test_what_was_acknowledged_is_read_and_more_is_taken_once_there_is_room(
    disk: SmallDisk, how: str, hindrance: str
) -> None:
    path, monitor = with_numbers(disk.place, how), StoreMonitor(disk.place)
    before = {file.name: file.read_bytes() for file in disk.place.iterdir() if not file.name.endswith("-shm")}
    with disk.full() if hindrance == "full" else disk.read_only():
        found = opened(path, monitor)
        assert numbers(found) == [1, 2, 3]
        with pytest.raises(StoreUnwritableError, match="cannot be written"):
            add(found, 4)
        if disk.is_mounted:
            assert not monitor.test()
        for name, content in before.items():
            assert (disk.place / name).read_bytes()[:8192] == content[:8192], "nothing of it was changed"
    assert monitor.test()
    add(found, 4)
    found.close()
    with closing(opened(path)) as again:
        assert numbers(again) == [1, 2, 3, 4]


def test_without_a_file_it_is_empty_until_one_can_be_made(disk: SmallDisk) -> None:
    path, monitor = disk.place / "numbers.sqlite3", StoreMonitor(disk.place)
    with disk.read_only():
        found = opened(path, monitor)
        assert numbers(found) == []
        with pytest.raises(StoreUnwritableError):
            add(found, 1)
    assert monitor.test()
    add(found, 1)
    assert numbers(found) == [1]
    found.close()


def test_tables_of_an_older_version_are_brought_up_in_memory_until_the_file_can_be(disk: SmallDisk) -> None:
    path, monitor = with_numbers(disk.place, "closed"), StoreMonitor(disk.place)
    newer = Schema(2, made_by("ALTER TABLE numbers ADD COLUMN y INTEGER DEFAULT 7"))
    with disk.read_only():
        found = Database(path, newer, "list of numbers", monitor)
        assert found.select("SELECT DISTINCT y FROM numbers") == [(7,)]
    assert monitor.test()
    assert found.select("SELECT DISTINCT y FROM numbers") == [(7,)]
    found.close()


@pytest.mark.parametrize("number", sorted(database.UNWRITABLE))
def test_every_reason_for_which_a_file_cannot_be_opened_for_writing_lets_it_be_read(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, monitor = with_numbers(tmp_path, "killed"), StoreMonitor(tmp_path)

    def refuse(path: Path) -> None:
        raise OSError(number, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(database, "_make_file", refuse)
        found = opened(path, monitor)
        assert numbers(found) == [1, 2, 3]
        assert not monitor.test()
        assert "list of numbers" in str(monitor.problem)
    assert monitor.test()
    assert monitor.problem is None
    add(found, 4)
    found.close()


def test_journal_that_can_only_be_read_has_its_records(disk: SmallDisk) -> None:
    with closing(SqliteJournal(disk.place / "live" / "a.sqlite3")) as live:
        live.commit(Position(), {"x": "1"})
        shutil.copytree(disk.place / "live", disk.place / "killed")
    with disk.read_only(), closing(SqliteJournal(disk.place / "killed" / "a.sqlite3")) as journal:
        page = journal.load()
        assert page.records == {"x": "1"}
        assert journal.since(page.position) is not None
        with pytest.raises(StoreUnwritableError):
            journal.commit(page.position, {"x": None})


@pytest.mark.parametrize("has_file", [True, False])
def test_store_that_is_read_only_is_locked_all_the_same(disk: SmallDisk, has_file: bool) -> None:
    store = disk.place / "store"
    lock_store(store).close()
    if not has_file:
        (store / "lock").unlink()
    with disk.read_only():
        first = lock_store(store)
        with pytest.raises(ConfigError, match="another server"):
            lock_store(store)
    with pytest.raises(ConfigError, match="another server"):
        lock_store(store)  # which could make the file now
    first.close()
    lock_store(store).close()


def test_what_is_damaged_is_not_taken_for_what_cannot_be_written(tmp_path: Path) -> None:
    path = with_numbers(tmp_path, "closed")
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(ConfigError, match=r"numbers\.sqlite3, the list of numbers, is damaged"):
        opened(path)
    path.write_bytes(b"")
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 9")
    with pytest.raises(ConfigError, match="newer"):
        opened(path)
