"""Samples and runs that nobody measured."""

from __future__ import annotations

from benchmarks.side_by_side.figures import Run
from benchmarks.workload import Measured, Sample


def run(engine: str, popularity: str, tokens_per_s: float, number: int = 1, failed: int = 0) -> Run:
    times = {"p50": 40.0, "p90": 50.0, "p99": 60.0}
    return Run(engine, engine.partition("-")[0], popularity, number, 4, failed, 1.0, tokens_per_s, times, times)


def measured(*first_tokens: int) -> Measured:
    samples = (Sample(0.5, (0.1, 0.3), (token, 7, 7), index) for index, token in enumerate(first_tokens))
    return Measured(2.0, tuple(samples))
