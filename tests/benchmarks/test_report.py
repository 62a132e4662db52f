"""The bench's figures, against numbers worked out by hand and by the standard library."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.report import OURS, Run, machine, medians, percentiles, ratios, same_first_token, write_report
from benchmarks.workload import Measured, Sample


def run(engine: str, popularity: str, tokens_per_s: float) -> Run:
    zero = {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    return Run(engine, popularity, 1, 0, 1.0, tokens_per_s, zero, zero)


def measured(*first_tokens: int) -> Measured:
    return Measured(2.0, tuple(Sample(0.5, (0.1, 0.3), (token, 7, 7)) for token in first_tokens))


def test_throughput_counts_output_tokens_over_wall_time() -> None:
    figures = Run.of(OURS, "base", measured(1, 2))
    assert figures.output_tokens_per_s == 3.0
    assert figures.ttft_ms["p50"] == 500.0
    assert figures.itl_ms["p99"] == 300.0


def test_percentiles_are_the_median_and_the_tail() -> None:
    seconds = [index / 1000 for index in range(101)]
    assert percentiles(seconds)["p50"] == 1000 * statistics.median(seconds)
    assert percentiles(list(reversed(seconds))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_rounds_are_reduced_to_their_median() -> None:
    (figures,) = medians([run(OURS, "base", speed) for speed in (1.0, 9.0, 2.0)])
    assert figures.output_tokens_per_s == 2.0


def test_ratios_compare_with_our_base_and_with_pefts_faster_dtype() -> None:
    runs = [
        run(OURS, "base", 100),
        run(OURS, "uniform", 80),
        run("peft-a", "uniform", 10),
        run("peft-b", "uniform", 20),
    ]
    assert ratios(runs) == {"uniform: share of base-only kept": 0.8, "uniform: times PEFT": 4.0}


def test_agreement_is_the_share_of_equal_first_tokens() -> None:
    assert same_first_token(measured(1, 2, 3, 4), measured(1, 2, 0, 4)) == 0.75


def test_report_is_json_with_runs_medians_and_ratios(tmp_path: Path) -> None:
    write_report(tmp_path / "deep" / "r.json", {"machine": machine()}, [run(OURS, "base", 5.0)])
    report = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert report["medians"][0]["output_tokens_per_s"] == 5.0
    assert report["machine"]["cores"] >= 1


@pytest.mark.parametrize("popularity", ["base", "identical"])
def test_failed_requests_are_counted(popularity: str) -> None:
    figures = Run.of(OURS, popularity, Measured(1.0, (), num_failed=3))
    assert (figures.requests, figures.failed, figures.output_tokens_per_s) == (3, 3, 0.0)
    assert "3 FAILED" in figures.line()
