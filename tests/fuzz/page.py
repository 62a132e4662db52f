"""The table of fuzzing in docs/explanation/reliability.md."""

from __future__ import annotations

from typing import Any

from benchmarks.reliability.page import PAGE
from benchmarks.report import made_on, put_between

BEGIN, END = "<!-- fuzz: begin -->", "<!-- fuzz: end -->"


def table(report: dict[str, Any]) -> str:
    """The figures as Markdown; a target's minutes and inputs are those of all runs, each of which began with what the
    ones before had kept.
    """
    rows = [
        "| parser | inputs | minutes of the processor | inputs kept | findings of the last run |",
        "|---|---|---|---|---|",
    ]
    for name, one in report["targets"].items():
        whole = one["in_all"]
        cells = (
            f"`{name}`",
            f"{whole['executions']:,}".replace(",", " "),
            f"{whole['cpu_seconds'] / 60:.0f}",
            one.get("corpus", one["starts"]),
            len(one["findings"]),
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*rows, "", f"The last run was made o{made_on(report['machine'])[1:]}"])


def write_page(report: dict[str, Any]) -> None:
    put_between(PAGE, BEGIN, END, table(report))
