"""Every fault of the ledger names tests that are there; one that is lost or moved is seen."""

from __future__ import annotations

from pathlib import Path

from tests.docs.faults import PAGE, followed, gone, rows

LEDGER = "| fault | held by |\n|---|---|\n| A key opened twice | `a/test_keys.py::test_key_opens_once` |\n"


def test_every_fault_is_held_by_tests_that_are_there() -> None:
    page = PAGE.read_text()
    assert len(rows(page)) >= 230
    assert [fault for fault, tests in rows(page) if not tests] == []
    assert list(gone(page)) == [], "renamed, or lost? `python -m tests.docs.faults` follows those that moved"


def test_lost_test_is_named_and_moved_one_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "test_keys.py").write_text("class TestKeys:\n    async def test_key_opens_once(self): ...\n")
    assert list(gone(LEDGER, tmp_path)) == []
    (tmp_path / "a" / "test_keys.py").rename(tmp_path / "test_doors.py")
    assert list(gone(LEDGER, tmp_path)) == ["a/test_keys.py::test_key_opens_once"]
    moved = followed(LEDGER, tmp_path)
    assert rows(moved) == [("A key opened twice", [("test_doors.py", "test_key_opens_once")])]
    assert list(gone(moved, tmp_path)) == []
    (tmp_path / "test_doors.py").write_text("def test_key_opens(): ...\n")
    assert followed(moved, tmp_path) == moved
    assert list(gone(moved, tmp_path)) == ["test_doors.py::test_key_opens_once"]
