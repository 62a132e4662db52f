"""The embedded catalog's file; what it does is in tests/contracts/test_catalog.py."""

from __future__ import annotations

import sqlite3
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.core.errors import ConfigError
from tests.catalog_versions import version


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = open_catalog(tmp_path / "store")
    yield catalog
    catalog.close()


def test_store_is_for_its_owner_only(catalog: Catalog, tmp_path: Path) -> None:
    Registration(id="a").commit(catalog.ledger, version("a"))
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_commits_are_flushed_to_disk(catalog: Catalog, tmp_path: Path) -> None:
    db = catalog.ledger.journal._db
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_listeners_come_and_go_while_a_commit_is_under_way(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do so on the event loop, and a commit may wait for a disk or a Redis that is silent."""
    begun, gate, heard, unheard = (threading.Event() for _ in range(4))
    commit, came, left = catalog.ledger.journal.commit, heard.set, unheard.set

    def slow(*arguments: Any, **more: Any) -> Position | None:
        begun.set()
        gate.wait(60)
        return commit(*arguments, **more)

    monkeypatch.setattr(catalog.ledger.journal, "commit", slow)
    with ThreadPoolExecutor(2) as threads:
        try:
            threads.submit(Registration(id="a").commit, catalog.ledger, version("a"))
            assert begun.wait(20)
            threads.submit(catalog.ledger.listen, came).result(5)
            threads.submit(catalog.ledger.listen, left).result(5)
            threads.submit(catalog.ledger.unlisten, left).result(5)
        finally:
            gate.set()
    assert (heard.is_set(), unheard.is_set()) == (True, False)


def test_second_server_on_one_store_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another server"):
        open_catalog(tmp_path / "store")
    catalog.close()
    open_catalog(tmp_path / "store").close()


def test_damaged_catalog_is_told_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite3").write_bytes(b"not a database" * 100)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--store .*not a database"):
            open_catalog(tmp_path)
    assert (tmp_path / "catalog.sqlite3").read_bytes().startswith(b"not a database")


def test_catalog_of_a_newer_release_is_not_touched(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "catalog.sqlite3")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="newer"):
        open_catalog(tmp_path)


def test_store_that_is_a_file_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(ConfigError, match="--store"):
        open_catalog(tmp_path / "store")
