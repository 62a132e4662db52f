"""An open loop: requests are sent when their time has come, whether or not earlier ones are answered.

The first token counts from the planned time, so that a load generator that is late does not flatter the server.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.http_load import planned, sample_of
from benchmarks.workload import Job, Sample
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.report import RequestRecord
from lora_serve.commands.bench.workload import Plan, Target


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one request; `sample` is None if it failed or was not answered in time."""

    at: float  # seconds from the start of the run, as planned
    sample: Sample | None


def poisson_times(rate_at: Callable[[float], float], seconds: float, seed: int | str) -> list[float]:
    """Arrival times in [0, seconds) of a Poisson process whose rate, a second, may change."""
    generator, times, now = random.Random(seed), list[float](), 0.0
    while (now := now + generator.expovariate(rate_at(now))) < seconds:
        times.append(now)
    return times


async def run_open(
    url: str, base: str, jobs: Sequence[Job], times: Sequence[float], output_tokens: int, patience: float
) -> list[Outcome]:
    """`jobs[i]` at `times[i]`; whoever is not answered `patience` seconds after the last time is cut off."""
    requests = [planned(job, output_tokens, at) for job, at in zip(jobs, times, strict=True)]
    result = await run_load(Target(url, base), Plan(requests, cut_off=(times[-1] if times else 0.0) + patience))
    return [Outcome(record.planned, _sample(record)) for record in result.records]


def _sample(record: RequestRecord) -> Sample | None:
    try:
        return sample_of(record)
    except ValueError:
        return None
