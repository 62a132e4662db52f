"""Rewrites the tables of README.md and docs/explanation/performance.md, and its pictures, from benchmarks/results.

    python -m benchmarks.performance

Measures nothing: `benchmarks.side_by_side`, `.step`, `.step_growth`, `.start` and `.many_adapters` do. Each table has
a part for every file that fits its pattern, one file per kind of processor and type, and each part says on which
processor it was measured. A table without any file stays as it is. Pictures need matplotlib (the extra `plots`).
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
from benchmarks.report import RESULTS
from benchmarks.step_growth_plot import draw
from lora_serve.model.native import levels

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "explanation" / "performance.md"
STEP, GROWTH = "step-[!g]*.json", "step-growth-*.json"
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "roofline": (STEP, tables.roofline),
    "ratios": (STEP, tables.ratios),
    "parts": (STEP, tables.parts),
    "operators": (STEP, tables.operators),
    "growth": (GROWTH, tables.growth_picture),
    "rows": (GROWTH, functools.partial(tables.growth, "rows", "ms, by rows")),
    "context": (GROWTH, functools.partial(tables.growth, "context", "ms, by keys of each row")),
    "adapters": (GROWTH, functools.partial(tables.growth, "adapters", "ms, by different adapters")),
    "rank": (GROWTH, functools.partial(tables.growth, "rank", "ms, by rank")),
    "chunk": (GROWTH, functools.partial(tables.growth, "chunk", "ms, by tokens")),
    "registered": (GROWTH, tables.registered),
    "start": ("start-*.json", tables.start),
    "many": ("many-adapters.json", tables.many),
}
SIDE_BY_SIDE = "side-by-side*.json"
BESIDE = {  # tables of several files: their patterns, and the columns
    "beside": ((SIDE_BY_SIDE,), ("base", "identical", "uniform")),
    "measured": (("side-by-side.json", "side-by-side-vllm.json", "side-by-side-a*.json"), ("base", "uniform")),
}
WITH_COMMANDS = ("roofline", "growth", "start", "many")  # the first tables of their files


def main() -> None:
    reports = read_reports()
    for page in (DOCUMENT, README):
        page.write_text(with_tables(page.read_text(), reports))
    for name in matching(GROWTH, reports):
        draw(reports[name], DOCUMENT.with_name(tables.growth_file(reports[name])))


def read_reports() -> dict[str, dict[str, Any]]:
    """File name -> what it holds, of those that a table is made of."""
    patterns = {pattern for pattern, _ in TABLES.values()} | {SIDE_BY_SIDE}
    files = (file for pattern in patterns for file in RESULTS.glob(pattern))
    return {file.name: json.loads(file.read_text()) for file in files}


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The files of a table, slower processors and float32 first."""

    def place(name: str) -> tuple[int, int, str]:
        level = next((i for i, level in enumerate(levels.LEVELS) if f"-{level}" in name), -1)
        return level, name.endswith("bfloat16.json"), Path(name).stem

    return sorted(fnmatch.filter(names, pattern), key=place)


def with_tables(text: str, reports: Mapping[str, dict[str, Any]]) -> str:
    """The document with its parts between `<!-- begin NAME -->` and `<!-- end -->` written anew."""

    def part(match: re.Match[str]) -> str:
        if match[1] in BESIDE:
            patterns, popularities = BESIDE[match[1]]
            names = [name for pattern in patterns for name in matching(pattern, reports)]
            made = tables.beside([reports[name] for name in names], popularities)
            return f"<!-- begin {match[1]} -->\n\n{made}\n<!-- end -->"
        pattern, make = TABLES[match[1]]
        names = matching(pattern, reports)
        words = tables.caption if match[1] in WITH_COMMANDS else tables.place
        made = [f"{words(reports[name])}.\n\n{make(reports[name])}" for name in names]
        return "\n".join([f"<!-- begin {match[1]} -->\n", *made, "<!-- end -->"]) if made else match[0]

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end -->", part, text, flags=re.DOTALL)


if __name__ == "__main__":
    main()
