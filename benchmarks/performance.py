"""Rewrites the tables and the picture of docs/explanation/performance.md from the files in benchmarks/results.

    python -m benchmarks.performance

Measures nothing: `benchmarks.step`, `.step_growth`, `.start` and `.many_adapters` do. A table whose file is not there
stays as it is. The picture needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import performance_tables as tables
from benchmarks.step_growth_plot import draw

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "explanation" / "performance.md"
GROWTH = "step-growth-cpu.json"
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "roofline": ("step-cpu.json", tables.roofline),
    "ratios": ("step-cpu.json", tables.ratios),
    "parts": ("step-cpu.json", tables.parts),
    "operators": ("step-cpu.json", tables.operators),
    "rows": (GROWTH, functools.partial(tables.growth, "rows", "ms, by rows")),
    "context": (GROWTH, functools.partial(tables.growth, "context", "ms, by keys of each row")),
    "adapters": (GROWTH, functools.partial(tables.growth, "adapters", "ms, by different adapters")),
    "rank": (GROWTH, functools.partial(tables.growth, "rank", "ms, by rank")),
    "chunk": (GROWTH, functools.partial(tables.growth, "chunk", "ms, by tokens")),
    "registered": (GROWTH, tables.registered),
    "start": ("start-cpu.json", tables.start),
    "many": ("many-adapters.json", tables.many),
}


def main() -> None:
    reports = read_reports()
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), reports))
    if GROWTH in reports:
        draw(reports[GROWTH], DOCUMENT.with_name("performance-growth.png"))


def read_reports() -> dict[str, dict[str, Any]]:
    """File name -> what it holds, of those that are there."""
    names = {file for file, _ in TABLES.values()}
    return {name: json.loads((RESULTS / name).read_text()) for name in names if (RESULTS / name).exists()}


def with_tables(text: str, reports: Mapping[str, dict[str, Any]]) -> str:
    """The document with its parts between `<!-- begin NAME -->` and `<!-- end -->` written anew."""

    def part(match: re.Match[str]) -> str:
        file, make = TABLES[match[1]]
        return f"<!-- begin {match[1]} -->\n\n{make(reports[file])}\n<!-- end -->" if file in reports else match[0]

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end -->", part, text, flags=re.DOTALL)


if __name__ == "__main__":
    main()
