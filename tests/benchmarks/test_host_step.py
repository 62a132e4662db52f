"""The host's time for a step is measured over steps that are launched ahead."""

from __future__ import annotations

from benchmarks.host_step import measure


def test_it_measures_steps_of_all_rows() -> None:
    found = measure(4, 40)
    assert min(found.values()) > 0.0
    assert found["step"] < 50.0
