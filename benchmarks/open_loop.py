"""An open loop: requests are sent when their time has come, whether or not earlier ones are answered.

The first token counts from the planned time, so that a load generator that is late does not flatter the server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import aiohttp

from benchmarks.http_load import send
from benchmarks.workload import Job, Sample


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
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
        start = time.perf_counter()
        end = start + (times[-1] if times else 0.0) + patience
        tasks = [_at(http, base, job, start + at, end, output_tokens) for job, at in zip(jobs, times, strict=True)]
        samples = await asyncio.gather(*tasks)
    return [Outcome(at, sample) for at, sample in zip(times, samples, strict=True)]


async def _at(
    http: aiohttp.ClientSession, base: str, job: Job, planned: float, end: float, output_tokens: int
) -> Sample | None:
    await asyncio.sleep(max(0.0, planned - time.perf_counter()))
    late = time.perf_counter() - planned
    try:
        async with asyncio.timeout(max(0.0, end - time.perf_counter())):
            sample = await send(http, base, job, output_tokens)
    except (TimeoutError, aiohttp.ClientError, ValueError):
        return None
    return replace(sample, first_token=sample.first_token + late)
