"""What a server and everything below it use of the machine, and the lag of its event loop, as it tells it itself."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.fleet.engines import engines_below
from benchmarks.fleet.site import ADMIN
from benchmarks.peers.processes import tree
from benchmarks.reliability.soak import slope
from lora_serve.commands.server_process import ServerProcess

SAMPLE_SECONDS = 5.0
MIB_OF_A_PAGE = os.sysconf("SC_PAGE_SIZE") / 2**20
LAG = "lora_serve_event_loop_lag_seconds"
PARTS = ("server", "engines", "others")  # others: Ray's own, and helpers of the server

Usage = dict[str, float]


def usage_of_all(process: ServerProcess) -> Usage:
    """Resident MiB of all processes and of each part, and the descriptors and threads of all that are there."""
    engines = set(engines_below([process.pid]))
    found = {f"memory_{part}": 0.0 for part in PARTS} | {"descriptors": 0.0, "threads": 0.0, "processes": 0.0}
    for pid in tree(process.pid):
        part = "server" if pid == process.pid else "engines" if pid in engines else "others"
        folder = Path("/proc") / str(pid)
        try:
            resident = int((folder / "statm").read_text().split()[1]) * MIB_OF_A_PAGE
            descriptors, threads = len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
        except OSError:
            continue  # it has just ended
        found[f"memory_{part}"] += resident
        found["descriptors"] += descriptors
        found["threads"] += threads
        found["processes"] += 1
    return {"memory": sum(found[f"memory_{part}"] for part in PARTS), **found}


async def keep_watching(process: ServerProcess, samples: list[Usage], started: float) -> None:
    """Append a sample every few seconds, without end."""
    loop = asyncio.get_running_loop()
    while True:
        samples.append({"at": loop.time() - started, **await asyncio.to_thread(usage_of_all, process)})
        await asyncio.sleep(SAMPLE_SECONDS)


def loop_thread(process: ServerProcess) -> tuple[float, float]:
    """Seconds that the thread of the server's event loop ran, and that it was ready to run and had no processor."""
    ran, waited, _ = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def slopes(samples: Sequence[Usage]) -> dict[str, float]:
    """MiB a minute, of all processes together and of each part."""
    names = ("memory", *(f"memory_{part}" for part in PARTS))
    return {name: round(slope([(one["at"] / 60, one[name]) for one in samples]), 3) for name in names}


async def lag_buckets(process: ServerProcess) -> dict[float, float]:
    """How many samples of the event loop's lag were up to so many seconds, from the server's start on."""
    async with (
        aiohttp.ClientSession(process.url, headers=ADMIN) as session,
        session.get("/metrics", headers={"Accept": "text/plain"}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return buckets_in(await answer.text())


def buckets_in(text: str) -> dict[float, float]:
    families = [family for family in text_string_to_metric_families(text) if family.name == LAG]
    samples: Iterable[Any] = families[0].samples
    return {float(one.labels["le"]): one.value for one in samples if one.name == f"{LAG}_bucket"}


def since(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    """The buckets of what came between."""
    return {edge: count - before.get(edge, 0.0) for edge, count in after.items()}


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """Seconds, on a line through the bucket in which it lies, as Prometheus' `histogram_quantile` has it."""
    edges = sorted(buckets)
    wanted = share * buckets[math.inf]
    low, below = 0.0, 0.0
    for edge in edges:
        if buckets[edge] >= wanted and buckets[edge] > below:
            return low if math.isinf(edge) else low + (edge - low) * (wanted - below) / (buckets[edge] - below)
        low, below = (low if math.isinf(edge) else edge), buckets[edge]
    return 0.0
