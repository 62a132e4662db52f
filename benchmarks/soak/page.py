"""The figures of the soak in docs/explanation/reliability.md, and what must not be among them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from benchmarks.reliability.page import PAGE
from benchmarks.report import made_on, put_between

BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
MAX_SLOPE = 0.2  # MiB of memory a minute, of all processes together, in the second half
LEAST_MINUTES = 15.0  # of a run whose slope is judged: before that, engines still learn what answers look like
MAX_LAG_MS = 50.0
MOST_WAITING = (
    0.1  # of the run in which the event loop's thread waits for a processor; beyond it the lag is the machine's
)
SLACK = {"descriptors": 8, "threads": 4}  # at rest: more at the end than in the middle
WANTED = 200_000  # answers, of all hosts


def failures(report: dict[str, Any]) -> list[str]:
    """What must not be; empty: the server withstood it all."""
    judges = (_of_host, _of_lag)
    return [f"{part['engine']}: {line}" for part in report["hosts"] for judge in judges for line in judge(part)]


def _of_host(part: dict[str, Any]) -> Iterator[str]:
    if part["wrong"] or not part["answers"]:
        yield f"{part['wrong']} of {part['answers']} wrong: {part['first_wrong']}"
    slope = part["slopes_mib_per_minute"]["memory"]
    if slope >= MAX_SLOPE and part["minutes"] >= LEAST_MINUTES:
        yield f"memory grows by {slope:+.2f} MiB/min: {part['slopes_mib_per_minute']}"
    middle, end = part["at_rest"]
    for name, slack in SLACK.items():
        if end[name] > middle[name] + slack:
            yield f"{name} at rest: {middle[name]:.0f} in the middle, {end[name]:.0f} at the end"


def _of_lag(part: dict[str, Any]) -> Iterator[str]:
    if part["lag_p99_ms"] > MAX_LAG_MS and not _waits(part):
        yield f"the event loop's lag has a p99 of {part['lag_p99_ms']:.0f} ms"


def _waits(part: dict[str, Any]) -> bool:
    """Whether other processes had the event loop's processor for long."""
    return bool(part["loop_thread_seconds"]["waited_for_a_processor"] > MOST_WAITING * part["minutes"] * 60)


def table(report: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = [_row(part) for part in report["hosts"]]
    answers, wrong = (sum(part[name] for part in report["hosts"]) for name in ("answers", "wrong"))
    head = (
        "| engine host | answers, of which JSON or calls | wrong | acts | engines killed | memory, MiB |"
        " slope, MiB/min: all, the server alone | descriptors, threads at rest |"
        " loop lag, p99; its thread ran, waited for a processor |"
    )
    total = f"Together {answers} answers, {wrong} wrong ({WANTED} are aimed at)."
    made = [made_on(report["machine"])] if "machine" in report else []
    return "\n".join([head, "|---" * 9 + "|", *rows, "", total, *made, *_missed(report)])


def _missed(report: dict[str, Any]) -> Iterator[str]:
    """Failures, and lags that other processes made."""
    found = failures(report)
    for part in report["hosts"]:
        if part["lag_p99_ms"] > MAX_LAG_MS and _waits(part):
            found.append(
                f"{part['engine']}: the event loop's lag has a p99 of {part['lag_p99_ms']:.0f} ms, on shared processors"
            )
    if found:
        yield ""
        yield "Bounds that were missed: " + "; ".join(re.split(r": [\[{]", line)[0] for line in found) + "."


def _row(part: dict[str, Any]) -> str:
    first, middle, last = part["memory_mib"]
    before, after = part["at_rest"]
    waited, slopes = part["loop_thread_seconds"], part["slopes_mib_per_minute"]
    cells = (
        f"{part['engine']}, {part['minutes']:g} min",
        f"{part['answers']}, {part['of_a_form']}",
        part["wrong"],
        part["acts"],
        f"{part['kills']}, {part['cut_with_words']} streams told to try again",
        f"{first:.0f}, {middle:.0f}, {last:.0f}",
        f"{slopes['memory']:+.2f}, {slopes['memory_server']:+.2f}",
        f"{before['descriptors']:.0f} to {after['descriptors']:.0f}, {before['threads']:.0f} to {after['threads']:.0f}",
        f"{part['lag_p99_ms']:.0f} ms; {waited['ran']:.0f} s, {waited['waited_for_a_processor']:.0f} s",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def write_page(report: dict[str, Any]) -> None:
    put_between(PAGE, BEGIN, END, table(report))
