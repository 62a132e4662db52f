"""Load and unload, ten thousand times, a checked answer between them; memory and descriptors meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.reliability.site import ADMIN, Site, get, usage_of
from benchmarks.reliability.soak import slope
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.commands.server_process import ServerProcess
from tests.canary.races import PROMPTS, Field, fault_of, question

NUM_WORKERS = 4
SAMPLES = 100  # of memory, in all
FLAGS = ("--max-loras", "2", "--max-cpu-loras", "3", "--admin-acts-per-minute", "1000000")


@dataclass
class _Count:
    begun: int = 0
    ended: int = 0
    wrong: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)


def cycles(site: Site, count: int = 10_000) -> dict[str, Any]:
    """Each cycle registers an id with another content than it had, asks, and unregisters it."""
    with site.server("cycles", *FLAGS) as process:
        started = time.monotonic()
        done = asyncio.run(_run(process, site.runners, count))
        seconds = time.monotonic() - started
        device = asyncio.run(get(process, "/admin/engine"))["tiers"]["device"]
        left = asyncio.run(get(process, "/admin/adapters"))["data"]
    half = done.samples[len(done.samples) // 2 :]
    figures = {
        "cycles": done.ended,
        "wrong": len(done.wrong),
        "first_wrong": done.wrong[:5],
        "left": len(left),
        "loads": device["misses"],
        "memory_mib": [round(done.samples[0]["memory"], 1), round(done.samples[-1]["memory"], 1)],
        "memory_slope_kib_per_1000": round(slope([(s["cycles"] / 1000, s["memory"] * 1024) for s in half]), 1),
        "descriptors": [min(s["descriptors"] for s in half), max(s["descriptors"] for s in half)],
        "threads": [min(s["threads"] for s in half), max(s["threads"] for s in half)],
        "seconds": round(seconds, 1),
    }
    print(f"cycles: {figures}", flush=True)
    return figures


async def _run(process: ServerProcess, runners: Field, count: int) -> _Count:
    done, every = _Count(), max(1, count // SAMPLES)
    folders = [str(folder) for folder in runners.folders.values()]
    digests = [adapter_digest(folder) for folder in runners.folders.values()]

    async def work(session: aiohttp.ClientSession, worker: int) -> None:
        while done.begun < count:
            number, done.begun = done.begun, done.begun + 1
            body = {"lora_name": f"worker-{worker}", "lora_path": folders[number % len(folders)]}
            await _call(session, "/v1/load_lora_adapter", body, done)
            prompt = number % len(PROMPTS)
            async with session.post("/v1/completions", json=question(body["lora_name"], prompt)) as response:
                fault = await fault_of(response, runners, prompt)
                if not fault and response.headers["X-Adapter-Digest"] != digests[number % len(folders)]:
                    fault = f"content {response.headers['X-Adapter-Digest']}"
            done.wrong += [fault] if fault else []
            await _call(session, "/v1/unload_lora_adapter", {"lora_name": body["lora_name"]}, done)
            done.ended += 1
            if done.ended % every == 0:
                done.samples.append({"cycles": done.ended, **usage_of(process)})

    async with aiohttp.ClientSession(process.url, headers=ADMIN) as session:
        await asyncio.gather(*(work(session, worker) for worker in range(NUM_WORKERS)))
    return done


async def _call(session: aiohttp.ClientSession, path: str, body: dict[str, str], done: _Count) -> None:
    async with session.post(path, json=body) as response:
        if response.status != 200:
            done.wrong.append(f"{path}: {response.status}: {(await response.text())[:200]}")
