"""What every report holds, against numbers worked out by hand and by the standard library."""

from __future__ import annotations

import statistics

from benchmarks.report import machine, percentiles


def test_percentiles_are_the_median_and_the_tail() -> None:
    seconds = [index / 1000 for index in range(101)]
    assert percentiles(seconds)["p50"] == 1000 * statistics.median(seconds)
    assert percentiles(list(reversed(seconds))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_the_machine_is_named_with_its_cores_and_versions() -> None:
    found = machine()
    assert found["cores"] >= 1
    assert found["versions"]["torch"].startswith("2.")
