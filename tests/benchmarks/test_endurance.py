"""The bounds of the endurance run: what exceeds one is a failure, in words."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.endurance.page import failures, table

TIMES = {"p50": 10.0}
STREAMS = {
    "streams": 1000,
    "open": 1000,
    "bytes_of_memory_for_each": 40_000,
    "bytes_left_by_each_again": 100,
    "memory_mib": [340.0, 380.0, 375.0, 375.1],
    "descriptors": [22, 1022, 22],
    "answer_ms_before": TIMES,
    "answer_ms_meanwhile": TIMES,
}
CYCLES = {
    "cycles": 10_000,
    "wrong": 0,
    "first_wrong": [],
    "left": 0,
    "memory_mib": [340.0, 345.0],
    "memory_slope_kib_per_1000": 900.0,
    "descriptors": [22, 24],
}


def found(part: str, change: dict[str, Any]) -> list[str]:
    whole: dict[str, Any] = {"cycles": dict(CYCLES), "streams": {"waiting": dict(STREAMS)}}
    (whole["streams"]["waiting"] if part == "streams" else whole["cycles"]).update(change)
    return [line for line in failures(whole) if "was not run" not in line]


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("cycles", {"wrong": 1}, "1 wrong"),
        ("cycles", {"left": 2}, "2 ids left"),
        ("cycles", {"memory_slope_kib_per_1000": 1025.0}, "memory or descriptors grow"),
        ("cycles", {"descriptors": [22, 31]}, "memory or descriptors grow"),
        ("streams", {"open": 900}, "streams: waiting"),
        ("streams", {"bytes_of_memory_for_each": 100_001}, "100001 bytes for each"),
        ("streams", {"bytes_left_by_each_again": 2_001}, "a second wave leaves 2001 bytes"),
    ],
)
def test_what_exceeds_a_bound_is_a_failure(part: str, change: dict[str, Any], words: str) -> None:
    assert found(part, {}) == []
    (line,) = found(part, change)
    assert words in line


def test_memory_of_a_run_of_few_cycles_is_not_judged() -> None:
    assert found("cycles", {"memory_slope_kib_per_1000": 1025.0, "cycles": 2000}) == []


def test_table_tells_what_a_second_wave_left() -> None:
    report = {"streams": {"waiting": STREAMS, "silent": STREAMS | {"memory_mib": [340.0, 350.0, 350.0]}}}
    waiting, silent = table(report).splitlines()[2:]
    assert "memory 340 MiB before, 375 after, 375 after as many again" in waiting
    assert "again" not in silent
