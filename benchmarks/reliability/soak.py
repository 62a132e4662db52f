"""Races and hang-ups for minutes, while memory, descriptors and threads are read."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.reliability.races import figures_of
from benchmarks.reliability.site import ADMIN, Site, usage_of
from benchmarks.reliability.storms import hang_up
from lora_serve.commands.server_process import ServerProcess
from tests.canary.races import Field, Outcome, quiet_field, race

SAMPLE_SECONDS = 5.0


def soak(site: Site, minutes: float, dtype: str) -> dict[str, Any]:
    """Races and hang-ups together, while the process is watched. In bfloat16 answers must be the bits of quiet ones."""
    flags = ("--dtype", dtype, "--max-loras", "4", "--max-cpu-loras", "6")
    with site.server(f"soak-{dtype}", *flags, modules=True) as process:
        runners = site.runners if dtype == "float32" else asyncio.run(quiet_field(process.url, ADMIN, site.runners))
        samples, outcome = asyncio.run(_soak(runners, process, minutes * 60))
    middle = max(1, len(samples) // 2)
    half = samples[middle:] or samples
    return {
        "dtype": dtype,
        "minutes": minutes,
        **figures_of(outcome),
        "memory_mib": [round(samples[0]["memory"], 1), round(samples[-1]["memory"], 1)],
        "memory_slope_mib_per_minute": round(slope([(s["at"] / 60, s["memory"]) for s in half]), 3),
        "descriptors": [max(s["descriptors"] for s in part) for part in (samples[:middle], half)],
        "threads": [min(s["threads"] for s in half), max(s["threads"] for s in half)],
        "samples": samples,
    }


async def _soak(runners: Field, process: ServerProcess, seconds: float) -> tuple[list[dict[str, float]], Outcome]:
    samples: list[dict[str, float]] = []
    total, started = Outcome(), time.monotonic()

    async def watch() -> None:
        while True:
            samples.append({"at": time.monotonic() - started, **usage_of(process)})
            await asyncio.sleep(SAMPLE_SECONDS)

    async def leave() -> None:
        generator = random.Random(11)
        while True:
            await hang_up(process.port, generator)
            await asyncio.sleep(0.02)

    beside = [asyncio.create_task(watch()), asyncio.create_task(leave())]
    seed = 100
    while time.monotonic() - started < seconds:
        _add(total, await race(process.url, ADMIN, runners, 1000, seed=seed))
        seed += 1
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    return samples, total


def _add(total: Outcome, part: Outcome) -> None:
    total.num_answers += part.num_answers
    total.num_gone += part.num_gone
    total.num_registrations += part.num_registrations
    total.num_deletions += part.num_deletions
    total.seconds += part.seconds
    total.wrong += part.wrong


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y); 0 of fewer than two."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
