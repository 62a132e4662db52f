"""What counts as a failure of `scripts/reliability`: each bound by itself."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reliability.page import failures

SOAK = {
    "dtype": "float32",
    "minutes": 10.0,
    "wrong": 0,
    "memory_slope_mib_per_minute": 0.9,
    "descriptors": [38, 42],
    "samples": [],
}
SOUND: dict[str, Any] = {
    "races": [{"wrong": 0}],
    "disconnects": {"canary_faults": 0, "descriptors": [20, 28]},
    "overload": {"canary_faults": 0, "statuses": {"200": 5, "429": 1, "503": 2}},
    "registry": {"faults": [], "trouble": []},
    "soaks": [SOAK],
}


@pytest.mark.parametrize(
    ("part", "found", "words"),
    [
        ("races", [{"wrong": 1}], "wrong answers"),
        ("disconnects", {"canary_faults": 0, "descriptors": [20, 29]}, "disconnects"),
        ("overload", {"canary_faults": 0, "statuses": {"200": 5, "500": 1}}, "overload"),
        ("registry", {"faults": ["lost"], "trouble": []}, "registry"),
        ("soaks", [SOAK | {"wrong": 1}], "soak"),
        ("soaks", [SOAK | {"memory_slope_mib_per_minute": 1.1}], "soak"),
        ("soaks", [SOAK | {"descriptors": [38, 43]}], "soak"),
    ],
)
def test_each_bound_that_is_missed_is_a_failure(part: str, found: Any, words: str) -> None:
    assert failures(SOUND) == []
    (line,) = failures(SOUND | {part: found})
    assert words in line


def test_slope_of_a_soak_of_few_minutes_is_not_judged() -> None:
    assert failures(SOUND | {"soaks": [SOAK | {"minutes": 3.0, "memory_slope_mib_per_minute": 3.0}]}) == []
