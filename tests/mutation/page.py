"""The table in docs/testing.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.report import put_between
from tests.mutation.places import PACKAGES, ROOT, package_of

PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


def killed_share(counts: dict[str, int]) -> float:
    """The part of those that somebody could see which a test saw."""
    return counts["killed"] / max(1, counts["killed"] + counts["survived"])


def table(report: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = ["| package | mutants | seen | not seen | harmless |", "|---|---|---|---|---|"]
    outcomes = Counter((package_of(entry["file"]), entry["outcome"]) for entry in report["mutants"])
    for name in PACKAGES:
        killed, survived, harmless = (outcomes[name, outcome] for outcome in ("killed", "survived", "harmless"))
        rows.append(f"| `{name}` | {killed + survived + harmless} | {killed} | {survived} | {harmless} |")
    first, last, made = report["runs"][0], report["runs"][-1], report["machine"]
    hangs = sum(entry.get("how") == "hang" for entry in report["mutants"])
    asked, sample, number = report["asked"], report["sample"], len(report["mutants"])
    words = (
        f"Seed {sample['seed']}, commit {made['commit']}, {made['date']}: {number} of {sample['number']} that were "
        f"drawn have been run. The tests see {killed_share(last):.1%} of those that are not harmless ({hangs} by a "
        f"hang), and {last['killed'] / number:.1%} of all; at first they saw {first['killed']} of "
        f"{first['killed'] + first['survived'] + first['harmless']}. "
        f"{asked['tests']} tests could be asked, for each mutant the fastest that run its line, at most "
        f"{asked['seconds']:.0f} s of them."
    )
    return "\n".join([words, "", *rows])


def write_page(report: dict[str, Any]) -> None:
    put_between(PAGE, BEGIN, END, table(report))
