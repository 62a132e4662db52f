"""A thousand uploads at once, of many tenants, while another asks: all come in, and nobody waits for them."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.endurance.process import peak_mib
from benchmarks.reliability.site import ADMIN, Site, get, usage_of
from benchmarks.report import percentiles
from lora_serve.commands.server_process import ServerProcess
from tests.canary.questions import BASE

NUM_TENANTS = 25  # of each at most 64 may wait
PAUSE = 0.05


def uploads(site: Site, count: int = 1_000) -> dict[str, Any]:
    """Whoever is refused with Retry-After sends again when it may."""
    contents = [_packed(folder) for folder in site.runners.folders.values()]
    with site.server("uploads", "--admin-acts-per-minute", "1000000") as process:
        before, peak = usage_of(process), peak_mib(process)
        found = asyncio.run(_run(process, contents, count))
        there = asyncio.run(_count(process))
        after = usage_of(process)
        found |= {
            "uploads": count,
            "there": there,
            "peak_above_start_mib": round(peak_mib(process) - peak, 1),
            "memory_mib": [round(before["memory"], 1), round(after["memory"], 1)],
            "descriptors": [before["descriptors"], after["descriptors"]],
        }
    print(f"uploads: {found}", flush=True)
    return found


async def _run(process: ServerProcess, contents: list[bytes], count: int) -> dict[str, Any]:
    statuses, is_over, latencies = Counter[str](), asyncio.Event(), list[float]()
    headers = {**ADMIN, "Content-Type": "application/octet-stream"}

    async def upload(session: aiohttp.ClientSession, number: int) -> None:
        path = f"/admin/adapters/tenant{number % NUM_TENANTS}/upload-{number}"
        while True:
            async with session.put(path, data=contents[number % len(contents)], headers=headers) as answer:
                statuses[str(answer.status)] += 1
                await answer.read()
                if answer.status not in (429, 503):
                    return
                wait = float(answer.headers["Retry-After"])
            await asyncio.sleep(wait)

    async def ask(session: aiohttp.ClientSession) -> None:
        while not is_over.is_set():
            started = time.perf_counter()
            body = {"model": BASE, "prompt": "Dear", "max_tokens": 2}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
            latencies.append(time.perf_counter() - started)
            await asyncio.sleep(PAUSE)

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(1800)
    async with (
        aiohttp.ClientSession(process.url, headers=ADMIN) as other,
        aiohttp.ClientSession(process.url, connector=connector, timeout=timeout) as session,
    ):
        quiet = asyncio.create_task(ask(other))
        await asyncio.sleep(3)
        num_quiet, started = len(latencies), time.monotonic()
        await asyncio.gather(*(upload(session, number) for number in range(count)))
        seconds = time.monotonic() - started
        is_over.set()
        await quiet
    return {
        "statuses": dict(statuses),
        "seconds": round(seconds, 1),
        "answer_ms_before": percentiles(latencies[:num_quiet]),
        "answer_ms_meanwhile": percentiles(latencies[num_quiet:]),
    }


async def _count(process: ServerProcess) -> int:
    return int((await get(process, "/admin/adapters?limit=1&fields=summary"))["total"])


def _packed(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, arcname=file.name)
    return buffer.getvalue()
