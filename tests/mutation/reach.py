"""Which tests run a line, and how long each takes: one run of the tests under coverage, one context a test."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.copies import Copies
from tests.mutation.places import FOLDERS, PACKAGES, ROOT, WORK

MOST_SECONDS = 15.0  # of tests as they were measured, for one mutant


@dataclass(frozen=True)
class Reach:
    """The tests that passed on the sound program, in seconds, and those that ran each line of each file."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, frozenset[str]]]
    failed: tuple[str, ...]

    def tests(self, file: str, line: int, source: str) -> list[str]:
        """The tests that can see a mutant of a line: those of its own folder first, of each function its fastest.

        A line that runs at import is seen by whatever test runs anything of the file, not only by one that imports it.
        """
        ran = self.lines.get(file, {})
        lines = ran.keys() if is_run_at_import(source, line) else statement(source, line)
        found = frozenset().union(*(ran.get(number, frozenset()) for number in lines))
        found = found or frozenset().union(*ran.values())
        return list(self._affordable(file, found))

    def _affordable(self, file: str, found: frozenset[str]) -> Iterable[str]:
        own = f"tests/{Path(file).relative_to('lora_serve').parent}/"
        seen = set[str]()
        firsts, others = list[str](), list[str]()
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            function = test.partition("[")[0]
            (others if function in seen else firsts).append(test)
            seen.add(function)
        left = MOST_SECONDS
        for test in sorted(firsts, key=lambda test: not test.startswith(own)) + others:
            left -= self.seconds[test]
            if left < 0:
                return
            yield test


def is_run_at_import(source: str, line: int) -> bool:
    """True for a line outside the bodies of all functions."""
    return not any(
        node.body[0].lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def statement(source: str, line: int) -> range:
    """The lines of the innermost statement around a line; of a compound one its head alone."""
    around = [
        range(node.lineno, _end(node) + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= _end(node)
    ]
    return min(around, key=len, default=range(line, line + 1))


def _end(node: ast.stmt) -> int:
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    last = _first(body[0]) - 1 if body else node.end_lineno
    return max(node.lineno, last or 0)


def _first(node: Any) -> int:
    if isinstance(node, ast.match_case):
        return int(node.pattern.lineno)
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


def measured(copies: Copies) -> Reach:
    """The reach of all tests; folders whose tests and packages have not changed are taken from the last run."""
    with ThreadPoolExecutor(copies.number) as pool:
        parts = list(pool.map(lambda folder: _part(copies, folder), FOLDERS))
    seconds = {test: spent for part in parts for test, spent in part["seconds"].items()}
    failed = tuple(sorted(test for part in parts for test in part["failed"]))
    lines: dict[str, dict[int, set[str]]] = {}
    for part in parts:
        names = list(part["seconds"])
        for file, ran in part["lines"].items():
            for line, tests in ran.items():
                lines.setdefault(file, {}).setdefault(int(line), set()).update(names[number] for number in tests)
    frozen = {file: {line: frozenset(tests) for line, tests in ran.items()} for file, ran in lines.items()}
    return Reach(seconds, frozen, failed)


def _part(copies: Copies, folder: str) -> dict[str, Any]:
    kept = WORK / "reach" / f"{folder.replace('/', '-')}-{_digest(folder)}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(_measure(copies, folder)))
    part: dict[str, Any] = json.loads(kept.read_text())
    return part


def _digest(folder: str) -> str:
    """Changes with the packages, with what tests share and with the tests of the folder."""
    known = hashlib.sha256()
    places = [*(ROOT / name for name in PACKAGES), ROOT / "tests" / folder]
    found = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    for file in sorted([*found, *(ROOT / "tests").glob("*.py")]):
        known.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return known.hexdigest()[:16]


def _measure(copies: Copies, folder: str) -> dict[str, Any]:
    with copies.borrowed() as copy:
        data = copy.folder / ".coverage"
        data.unlink(missing_ok=True)
        done = copy.under_coverage(f"tests/{folder}", data, PACKAGES)
        if done.code not in (0, 1):
            sys.exit(f"tests/{folder} could not be measured:\n{done.output[-3000:]}")
        passed = {line["test"]: line["seconds"] for line in done.record if not line["failed"]}
        lines = _lines(copy.folder, data, {test: number for number, test in enumerate(passed)})
        print(f"measured tests/{folder}: {len(passed)} tests", flush=True)
    failed = [line["test"] for line in done.record if line["failed"]]
    return {"seconds": passed, "failed": failed, "lines": lines}


def _lines(folder: Path, data: Path, numbers: dict[str, int]) -> dict[str, dict[int, list[int]]]:
    from coverage import CoverageData

    known = CoverageData(str(data))
    known.read()
    found = {}
    for file in known.measured_files():
        ran = {
            line: sorted(numbers[test] for test in tests if test in numbers)
            for line, tests in known.contexts_by_lineno(file).items()
        }
        found[os.path.relpath(file, folder)] = {line: tests for line, tests in ran.items() if tests}
    return found
