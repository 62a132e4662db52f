"""A soak of one engine host: engines are killed in its first quarter, and the machine is judged in its second half."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from benchmarks.fleet.site import ADMIN
from benchmarks.soak.breaking import kill_engines
from benchmarks.soak.site import Site
from benchmarks.soak.traffic import SoakTraffic
from benchmarks.soak.watching import (
    Usage,
    keep_watching,
    lag_buckets,
    loop_thread,
    quantile,
    since,
    slopes,
    usage_of_all,
)
from lora_serve.commands.server_process import ServerProcess
from tests.rolling.holding import missing
from tests.rolling.round_robin import RoundRobin

REPLICAS = 2  # of a fleet
KILLED_SHARE = 1 / 4  # of the time: an engine needs minutes until it has learned again what answers look like
TOLD = 8  # faults in words; all are counted
QUIET_SECONDS = 3.0  # after which connections that were left are gone, and usage is written
MAX_LAG = 0.05  # seconds


def soak(site: Site, engine: str, minutes: float) -> dict[str, Any]:
    with site.server(engine, REPLICAS) as process:
        figures = {"engine": engine, "minutes": minutes, **asyncio.run(_soak(site, process, minutes * 60))}
    print(f"soak: { {name: value for name, value in figures.items() if name != 'samples'} }", flush=True)
    return figures


async def _soak(site: Site, process: ServerProcess, seconds: float) -> dict[str, Any]:
    started, samples = time.monotonic(), list[Usage]()
    watching = asyncio.create_task(keep_watching(process, samples, started))
    before, (ran, waited) = await lag_buckets(process), loop_thread(process)
    rests, lost, begun, traffic = [], list[str](), 0.0, None
    try:
        for half in range(2):
            end = started + seconds * (half + 1) / 2
            begun = time.monotonic() - started
            async with _session() as session:  # of its own, so that nothing is open at rest
                if traffic is None:
                    traffic = SoakTraffic(RoundRobin([process.url], session), ADMIN, site.runners)
                    await traffic.settle()
                traffic.client.session = session
                traffic.start()
                if half == 0:
                    await kill_engines(process, traffic.breaks, started + seconds * KILLED_SHARE)
                await asyncio.sleep(max(0.0, end - time.monotonic()))
                await traffic.rest()
            await asyncio.sleep(QUIET_SECONDS)
            rests.append(await asyncio.to_thread(usage_of_all, process))
            lag = since(before, await lag_buckets(process))
            lost += await missing(traffic, [process.url])
        ran, waited = (later - earlier for later, earlier in zip(loop_thread(process), (ran, waited), strict=True))
    finally:
        watching.cancel()
    assert traffic is not None
    half_of = [sample for sample in samples if begun <= sample["at"] < seconds]
    return {
        **_answers(traffic, lost),
        "kills": len(traffic.breaks),
        "away_seconds": [round(one.until - one.since, 1) for one in traffic.breaks],
        "lag_p99_ms": round(quantile(lag, 0.99) * 1000, 1),
        "lag_over_50_ms": round(1 - lag[MAX_LAG] / lag[float("inf")], 5),
        "loop_thread_seconds": {"ran": round(ran, 1), "waited_for_a_processor": round(waited, 1)},
        "memory_mib": [round(samples[0]["memory"], 1), round(half_of[0]["memory"], 1), round(samples[-1]["memory"], 1)],
        "slopes_mib_per_minute": slopes(half_of),
        "at_rest": rests,
        "samples": [{name: round(value, 1) for name, value in sample.items()} for sample in samples],
    }


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(120))


def _answers(traffic: SoakTraffic, lost: list[str]) -> dict[str, Any]:
    wrong = [*traffic.wrong, *traffic.client.faults, *lost]
    return {
        "answers": traffic.num_answers,
        "of_a_form": traffic.num_written,
        "wrong": len(wrong),
        "first_wrong": wrong[:TOLD],
        "acts": len(traffic.ledger.acts),
        "statuses": dict(traffic.client.counts),
        "refusals": dict(traffic.client.refusals.most_common(TOLD)),
        "cut_with_words": traffic.num_cut,
        "hung_up": traffic.num_left,
        "guests": traffic.num_guests,
    }
