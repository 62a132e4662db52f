"""Every fault of the ledger names tests that are there; one that is lost or moved is seen."""

from __future__ import annotations

from pathlib import Path

from tests.docs.faults import PAGE, TESTS, by_day, followed, gone, rows

LEDGER = "| fault | held by |\n|---|---|\n| A key opened twice | `a/test_keys.py::test_key_opens_once` |\n"


def test_every_fault_is_held_by_tests_that_are_there() -> None:
    page = PAGE.read_text()
    assert len(rows(page)) >= 230
    assert [fault for fault, tests in rows(page) if not tests] == []
    assert list(gone(page)) == [], "renamed, or lost? `python -m tests.docs.faults` follows those that moved"


# By day nothing of them can be seen: they need a GPU, a Ray cluster that dies, or minutes of measuring.
BY_NIGHT_ALONE = (
    "On a GPU a prompt of another length, or the first adapter of a greater rank, could make Triton compile",
    "Lines of Ray that are no JSON stood in a JSON log when Ray died",
    "A name that is hidden from a tenant took longer to look up than one that nobody has",
    "A server that hangs was shown as live",
)


def test_every_fault_is_held_by_day() -> None:
    seen = {fault: any(name in by_day(TESTS / file) for file, name in tests) for fault, tests in rows(PAGE.read_text())}
    assert [fault for fault, is_seen in seen.items() if not is_seen and not fault.startswith(BY_NIGHT_ALONE)] == []


def test_nightly_tests_are_not_of_the_day(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("@pytest.mark.nightly\ndef test_a(): ...\n@pytest.mark.many(2)\ndef test_b(): ...\n")
    assert by_day(file) == {"test_b"}
    file.write_text(f"pytestmark = [pytest.mark.nightly]\n{file.read_text()}")
    assert by_day(file) == set()


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
