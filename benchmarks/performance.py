"""Rewrites the tables of README.md and docs/explanation/performance.md, and its pictures, from benchmarks/results.

    python -m benchmarks.performance

Measures nothing: `benchmarks.side_by_side`, `.step`, `.step_growth`, `.speculation`, `.start` and `.many_adapters`
do. Each table has a part, or rows, for every file that fits its pattern, one file per kind of processor and type, and
says on which processor and when it was measured. A table without any file stays as it is. Pictures need matplotlib
(the extra `plots`).
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import performance_tables as tables
from benchmarks.aims import aims_table
from benchmarks.report import RESULTS
from benchmarks.step_growth_plot import draw
from lora_serve.model.native import compiler

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "explanation" / "performance.md"
STEP, GROWTH = "step-[!g]*.json", "step-growth-*.json"
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {  # a part for each file
    "roofline": (STEP, tables.roofline),
    "parts": (STEP, tables.parts),
    "newer": ("newer-shapes.json", tables.newer),
    "growth": (GROWTH, tables.growth_picture),
    "rows": (GROWTH, functools.partial(tables.growth, "rows", "by rows")),
    "context": (GROWTH, functools.partial(tables.growth, "context", "by keys of each row")),
    "adapters": (GROWTH, functools.partial(tables.growth, "adapters", "by different adapters")),
    "rank": (GROWTH, functools.partial(tables.growth, "rank", "by rank")),
    "chunk": (GROWTH, functools.partial(tables.growth, "chunk", "by tokens")),
    "registered": (GROWTH, tables.registered),
    "start": ("start-*.json", tables.start),
    "many": ("many-adapters.json", tables.many),
}
WITH_COMMANDS = ("roofline", "newer", "growth", "start", "many")  # the first tables of their files
SIDE_BY_SIDE, SPECULATION = "side-by-side*.json", "speculation*.json"
JOINT: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {  # one table of all files of a pattern
    "beside": (SIDE_BY_SIDE, functools.partial(tables.beside, popularities=("base", "identical", "uniform"))),
    "latencies": (SIDE_BY_SIDE, tables.latencies),
    "measured": (SIDE_BY_SIDE, functools.partial(tables.beside, popularities=("base", "uniform"))),
}


def main() -> None:
    reports = read_reports()
    for page in (DOCUMENT, README):
        page.write_text(with_tables(page.read_text(), reports))
    for name in matching(GROWTH, reports):
        draw(reports[name], DOCUMENT.with_name(tables.growth_file(reports[name])))


def read_reports() -> dict[str, dict[str, Any]]:
    """File name -> what it holds, of those that a table is made of."""
    patterns = {pattern for pattern, _ in (*TABLES.values(), *JOINT.values())} | {SPECULATION}
    files = (file for pattern in patterns for file in RESULTS.glob(pattern))
    return {file.name: json.loads(file.read_text()) for file in files}


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The files of a table, slower processors and float32 first."""

    def place(name: str) -> tuple[int, int, str]:
        level = next((i for i, level in enumerate(compiler.LEVELS) if f"-{level}" in name), -1)
        return level, name.endswith("bfloat16.json"), Path(name).stem

    return sorted(fnmatch.filter(names, pattern), key=place)


def with_tables(text: str, reports: Mapping[str, dict[str, Any]]) -> str:
    """The document with its parts between `<!-- begin NAME -->` and `<!-- end -->` written anew."""

    def part(match: re.Match[str]) -> str:
        made = _part(match[1], reports)
        return f"<!-- begin {match[1]} -->\n\n{made}\n<!-- end -->" if made else match[0]

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end -->", part, text, flags=re.DOTALL)


def _part(name: str, reports: Mapping[str, dict[str, Any]]) -> str:
    """The table or tables of a name; empty: there is no file for them."""
    if name == "aims":
        return aims_table(reports)
    if name in JOINT:
        pattern, make = JOINT[name]
        files = matching(pattern, reports)
        return make([reports[file] for file in files]) if files else ""
    if name == "speculation":
        kinds: dict[str, list[dict[str, Any]]] = {}
        for file in matching(SPECULATION, reports):
            report = reports[file]
            place = tables.caption(report | {"dtype": report["cells"][0]["dtype"]})
            kinds.setdefault(place, []).append(report)
        return "\n".join(f"{place}.\n\n{tables.speculation(found)}" for place, found in kinds.items())
    pattern, make_one = TABLES[name]
    words = tables.caption if name in WITH_COMMANDS else tables.place
    found = [reports[file] for file in matching(pattern, reports)]
    return "\n".join(f"{words(report)}.\n\n{make_one(report)}" for report in found)


if __name__ == "__main__":
    main()
