"""The ledger of mended faults, docs/faults.md: each row names the tests that hold it, as FILE::NAME below tests/.

python -m tests.docs.faults     follows tests that moved, and names those that are gone (then the exit code is 1)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "faults.md"
TESTS = ROOT / "tests"
_ROW = re.compile(r"^\| (?!fault \||-)(?P<fault>.*) \| (?P<held>.*) \|$", re.M)
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows(page: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each fault with the file and the name of each test that holds it."""
    return [(row["fault"], _TEST.findall(row["held"])) for row in _ROW.finditer(page)]


def gone(page: str, tests: Path = TESTS) -> Iterator[str]:
    """The tests that a page names and that are not there, each once."""
    names: dict[str, set[str]] = {}
    for file, name in dict.fromkeys(_TEST.findall(page)):
        if file not in names:
            names[file] = written(tests / file)
        if name not in names[file]:
            yield f"{file}::{name}"


def written(file: Path) -> set[str]:
    """The names of the tests in a file; none if there is no such file."""
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def by_day(file: Path) -> set[str]:
    """The names of the tests in a file that are not left to the nightly tier by a mark of their own or of the file."""
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    of_file = [node.value for node in tree.body if isinstance(node, ast.Assign) and _names(node, "pytestmark")]
    if any("mark.nightly" in ast.unparse(mark) and "nightly=" not in ast.unparse(mark) for mark in of_file):
        return set()
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    is_nightly = {one.name: "pytest.mark.nightly" in map(ast.unparse, one.decorator_list) for one in functions}
    return {name for name in written(file) if not is_nightly[name]}


def _names(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def followed(page: str, tests: Path = TESTS) -> str:
    """The page with the present place of each test that is in one other file now."""
    for lost in gone(page, tests):
        name = lost.partition("::")[2]
        text = re.compile(rf"^\s*(?:async )?def {name}\b", re.M)
        places = [file for file in tests.rglob("test_*.py") if text.search(file.read_text())]
        if len(places) == 1:
            page = page.replace(f"`{lost}`", f"`{places[0].relative_to(tests)}::{name}`")
    return page


def main() -> int:
    """Rewrites the page and prints what is gone."""
    PAGE.write_text(followed(PAGE.read_text()))
    lost = list(gone(PAGE.read_text()))
    print("\n".join([*lost, f"{len(lost)} tests that docs/faults.md names are gone"]))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
