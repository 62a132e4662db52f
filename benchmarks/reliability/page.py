"""The figures in docs/explanation/reliability.md, and what must not be among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.reliability.site import NUM_ADAPTERS
from benchmarks.report import made_on, put_between

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
MAX_SLOPE = 1.0  # MiB of memory per minute; a leak of 1 KiB per request is several times that
MORE_DESCRIPTORS = 4  # at most in a soak's second half than in its first; of each the most, for rounds come and go
LEAST_MINUTES = 5.0  # of a soak whose slope is judged: memory comes in pieces of megabytes, each a slope for minutes


def failures(report: dict[str, Any]) -> list[str]:
    """What must not be; empty: the server withstood it all."""
    found = [f"wrong answers: {part}" for part in report["races"] if part["wrong"]]
    storm, flood = report["disconnects"], report["overload"]
    if storm["canary_faults"] or storm["descriptors"][1] > storm["descriptors"][0] + 8:
        found.append(f"disconnects: {storm}")
    if flood["canary_faults"] or set(flood["statuses"]) - {"200", "429", "503"}:
        found.append(f"overload: {flood}")
    shared = report["registry"]
    if shared["faults"] or shared["trouble"]:
        found.append(f"registry: {shared}")
    return found + [
        f"soak: { {name: value for name, value in long.items() if name != 'samples'} }"
        for long in report["soaks"]
        if long["wrong"] or _grows(long)
    ]


def _grows(long: dict[str, Any]) -> bool:
    first, second = long["descriptors"]
    is_steep = long["minutes"] >= LEAST_MINUTES and long["memory_slope_mib_per_minute"] > MAX_SLOPE
    return bool(is_steep or second > first + MORE_DESCRIPTORS)


def table(report: dict[str, Any]) -> str:
    """The figures as Markdown."""
    storm, flood = report["disconnects"], report["overload"]
    rows = [
        _row(
            f"{part['answers']} answers (`--engine {part['engine']}`), {NUM_ADAPTERS} adapters on {part['slots']} "
            f"slots, {part['registrations']} registrations and {part['deletions']} deletions meanwhile",
            f"{part['wrong']} wrong, {part['evictions']} evictions, {part['seconds']:.0f} s",
        )
        for part in report["races"]
    ]
    before, after = storm["descriptors"]
    rows.append(
        _row(
            f"{storm['clients']} clients that hang up, in {storm['seconds']:.0f} s",
            f"{storm['canary_answers']} canary answers, {len(storm['canary_faults'])} wrong; descriptors "
            f"{before:.0f} before, {after:.0f} after",
        )
    )
    statuses = ", ".join(f"{count} x {status}" for status, count in flood["statuses"].items())
    rows.append(_row(f"{flood['requests']} requests at once where 64 may wait", statuses))
    if shared := report.get("registry"):  # results of earlier versions have none
        rows.append(
            _row(
                f"three servers on one Redis, {shared['minutes']:g} minutes: networks, Redis and servers broken "
                f"{shared['breaks']} times",
                f"{shared['operations']} operations, {shared['changes']} changes acknowledged, {shared['unknown']} of "
                f"unknown end; {len(shared['faults'])} not as promised; replicas that reached Redis agreed within "
                f"{shared['lag_seconds'] * 1000:.0f} ms",
            )
        )
    rows += [_soak_row(long) for long in report["soaks"]]
    return "\n".join(["| what | came of it |", "|---|---|", *rows, "", made_on(report["machine"])])


def _soak_row(long: dict[str, Any]) -> str:
    (first, last), (fewest, most) = long["memory_mib"], long["threads"]
    return _row(
        f"soak of {long['minutes']:g} minutes in {long['dtype']}: races and hang-ups",
        f"{long['answers']} answers, {long['wrong']} wrong; memory {first:.0f} to {last:.0f} MiB, slope "
        f"{long['memory_slope_mib_per_minute']:+.2f} MiB/min; threads {fewest:.0f} to {most:.0f}",
    )


def _row(what: str, came: str) -> str:
    return f"| {what} | {came} |"


def write_page(report: dict[str, Any]) -> None:
    put_between(PAGE, BEGIN, END, table(report))
