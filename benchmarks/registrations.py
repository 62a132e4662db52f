"""Registrations over HTTP: how many a second, as a store fills, by eight clients of eight tenants or of one.

    python -m benchmarks.registrations [--count N] [--clients N] [--store DIR] [--registered N] [--out FILE]

Small siblings of one adapter, each other content, are uploaded as tars by a closed loop of clients. The store must lie
on a disk: on a memory disk a flush costs nothing. Beside them `/health` is asked for, and at the end a page of 500.

With --registered N: instead, starts on an empty store and on one of N adapters in turn, and pages of 500 of these.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.endurance.process import processor_seconds
from benchmarks.endurance.registered import _register, fill
from benchmarks.reliability.site import ADMIN, Site, usage_of
from benchmarks.report import RESULTS, machine, percentiles
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, WEIGHTS_NAME
from lora_serve.commands.server_process import ServerProcess
from tests.canary.questions import make_world
from tests.canary.races import Field

PAUSE = 0.02
PAGES = 9
PAGE_OF_500 = "/admin/adapters?limit=500"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--store", type=Path, help="an empty folder on a disk")
    parser.add_argument("--out", type=Path, default=RESULTS / "registrations.json")
    parser.add_argument("--registered", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lora_serve-registrations-", dir=options.store) as folder:
        site = Site(make_world(Path(folder) / "world"), Field({}, {}), Path(folder))
        if options.registered:
            runs = {"starts": starts(site, options.registered)}
        else:
            runs = {name: measure(site, name, options.count, options.clients, tenants)
                    for name, tenants in (("eight_tenants", 8), ("one_tenant", 1))}  # fmt: skip
    options.out.write_text(json.dumps({"machine": machine(), **runs}, indent=1) + "\n")


def measure(site: Site, name: str, count: int, clients: int, tenants: int) -> dict[str, Any]:
    """Figures of each third, of the load on `/health`, of a page, and of the next start."""
    flags = ("--admin-acts-per-minute", "0")
    with site.server(name, *flags) as process:
        found = asyncio.run(_run(process, site.world.adapters["acme/a"], count, clients, tenants))
        found["processor_s"] = round(processor_seconds(process), 1)
    for title, store in (("restart_s", name), ("empty_start_s", f"{name}-empty")):
        started = time.monotonic()
        with site.server(store, *flags):
            found[title] = round(time.monotonic() - started, 2)
    print(f"{name}: {found}", flush=True)
    return found


def starts(site: Site, count: int, times: int = 3) -> dict[str, Any]:
    """Seconds, and of the processor, until ready, with and without `count` adapters; milliseconds of pages of these."""
    with site.server("full") as process:
        asyncio.run(_register(process, "first/one", site.world.adapters["acme/a"]))
    fill(site.root / "full", count - 1)
    found: dict[str, Any] = {"adapters": count}
    for _ in range(times):
        for store in ("empty", "full"):
            started = time.monotonic()
            with site.server(store) as process:
                found.setdefault(f"{store}_s", []).append(round(time.monotonic() - started, 2))
                found.setdefault(f"{store}_processor_s", []).append(round(processor_seconds(process), 2))
                if store == "full":
                    found |= asyncio.run(_pages(process))
                    found["memory_mib"] = round(usage_of(process)["memory"])
    print(found, flush=True)
    return found


async def _pages(process: ServerProcess) -> dict[str, Any]:
    """Beside the sweep that follows a start."""
    async with aiohttp.ClientSession(process.url, headers=ADMIN) as session:
        return {"page_of_500_ms": percentiles([await _seconds(session, PAGE_OF_500) for _ in range(PAGES)])}


async def _run(process: ServerProcess, like: Path, count: int, clients: int, tenants: int) -> dict[str, Any]:
    numbers, times, latencies = iter(range(count)), list[float](), list[float]()
    config, weights = (like / CONFIG_NAME).read_bytes(), (like / WEIGHTS_NAME).read_bytes()
    headers = {**ADMIN, "Content-Type": "application/octet-stream"}
    async with aiohttp.ClientSession(process.url, headers=ADMIN) as session:

        async def upload() -> None:
            for number in numbers:
                path = f"/admin/adapters/tenant{number % tenants}/adapter-{number:06}"
                async with session.put(path, data=_packed(config, weights, number), headers=headers) as answer:
                    assert answer.status == 201, await answer.text()
                    await answer.read()
                times.append(time.monotonic())

        async def watch() -> None:
            while True:
                latencies.append(await _seconds(session, "/health"))
                await asyncio.sleep(PAUSE)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(1)
        quiet, started = len(latencies), time.monotonic()
        await asyncio.gather(*(upload() for _ in range(clients)))
        busy = len(latencies)
        pages = [await _seconds(session, PAGE_OF_500) for _ in range(PAGES)]
        watching.cancel()
    third = count // 3
    return {
        "adapters": count,
        "per_second": [
            round(third / (times[end - 1] - (times[end - third - 1] if end > third else started)), 1)
            for end in (third, 2 * third, 3 * third)
        ],
        "health_ms": percentiles(latencies[:quiet]),
        "health_ms_meanwhile": percentiles(latencies[quiet:busy]),
        "health_ms_beside_pages": percentiles(latencies[busy:]),
        "page_of_500_ms": percentiles(pages),
    }


async def _seconds(session: aiohttp.ClientSession, path: str) -> float:
    started = time.perf_counter()
    async with session.get(path) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return time.perf_counter() - started


def _packed(config: bytes, weights: bytes, number: int) -> bytes:
    buffer = io.BytesIO()
    content = weights[:-4] + (0x3C000000 + number).to_bytes(4, "little")  # the last weight is another number
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in ((CONFIG_NAME, config), (WEIGHTS_NAME, content)):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


if __name__ == "__main__":
    main()
