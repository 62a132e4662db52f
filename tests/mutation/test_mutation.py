"""Harmless mutants have their place and a reason; what is left out of the sample is what the rule says."""

from __future__ import annotations

import pytest

from tests.mutation.harmless import FILE, listed, reasons
from tests.mutation.left_out import is_left_out
from tests.mutation.page import BEGIN, END, PAGE
from tests.mutation.places import FOLDERS, PACKAGES, ROOT, files, package_of, shares
from tests.mutation.reach import Reach, statement

PROGRAM = '''
_log = get_logger()

@dataclass(frozen=True)
class Slot:
    """A slot."""

    index: int | None = 1

    def __repr__(self) -> str:
        return "slot" + str(self.index)

    @override
    def moved(self, by: int | None, *, far: bool = False) -> Slot:
        _log.info("moved", by=by + 1)
        return Slot(self.index + by)
'''


def test_every_harmless_mutant_has_its_line_and_a_reason() -> None:
    for mutant in listed():
        lines = [line.strip() for line in (ROOT / mutant["file"]).read_text().splitlines()]
        assert mutant["text"] in lines, f"{FILE}: {mutant['file']} has no such line: {mutant['text']}"
        assert len(mutant["reason"].split()) > 4, mutant
    assert len(reasons()) == len(listed()), "one stands there twice"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int | None = 1", "int & None = 1"),
        ("by: int | None", "by: int + None"),
        ("frozen=True", "frozen=False"),
        ('"slot" + str', '"slot" - str'),
        ("by=by + 1", "by=by - 1"),
        ("    @override\n", ""),
        ("*, far", "/, far"),
        ("*, far", "*, , far"),
    ],
    ids=["annotation", "argument", "frozen", "repr", "log", "override", "keywords", "no_program"],
)
def test_what_no_test_need_see_is_left_out(old: str, new: str) -> None:
    assert PROGRAM.count(old) == 1
    assert is_left_out(PROGRAM, PROGRAM.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= 1\n", "= 2\n"),
        ("self.index + by", "self.index - by"),
        ("= False)", "= True)"),
        ("@dataclass(frozen=True)\n", ""),
    ],
    ids=["number", "operator", "default", "decorator"],
)
def test_what_the_program_does_is_not_left_out(old: str, new: str) -> None:
    assert PROGRAM.count(old) == 1
    assert not is_left_out(PROGRAM, PROGRAM.replace(old, new))


def test_line_of_a_statement_is_run_by_whoever_runs_the_statement() -> None:
    source = "if (a and\n    b):\n    f(\n        1,\n    )\n"
    assert statement(source, 2) == range(1, 3)
    assert statement(source, 4) == range(3, 6)


def test_line_that_runs_at_import_is_seen_by_whoever_runs_anything_of_the_file() -> None:
    """Even if the file is first imported within some test."""
    source = "LIMIT = 1\n\ndef one():\n    return LIMIT\n\ndef other(limit=2):\n    return limit\n"
    file = "lora_serve/engine/x.py"
    first, second = frozenset({"tests/a.py::first"}), frozenset({"tests/a.py::second"})
    reach = Reach(
        dict.fromkeys([*first, *second], 0.1), {file: {1: first, 3: first, 4: first, 6: first, 7: second}}, ()
    )
    assert {line: set(reach.tests(file, line, source)) for line in (1, 4, 6, 7)} == {
        1: first | second,
        4: first,
        6: first | second,
        7: second,
    }


def test_shares_are_whole_and_in_proportion() -> None:
    assert shares({"a": 600, "b": 300, "c": 101}, 10) == {"a": 6, "b": 3, "c": 1}
    assert sum(shares({"a": 1, "b": 1, "c": 1}, 200).values()) == 200


def test_places_that_are_named_are_there() -> None:
    assert all((ROOT / "tests" / folder).exists() for folder in FOLDERS)
    assert {package_of(file) for file in files()} == set(PACKAGES)
    assert PAGE.read_text().index(BEGIN) < PAGE.read_text().index(END)
