"""Clients that hang up, and more of them than may wait; canaries ask meanwhile, or afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from benchmarks.reliability.site import Site, get, usage_of
from lora_serve.commands.server_process import ServerProcess
from tests.canary.asking import Canaries, Verdict
from tests.canary.questions import BASE, World


def disconnects(site: Site, num_clients: int) -> dict[str, Any]:
    """Clients that hang up at any moment, while canaries ask."""
    with site.server("storm", "--max-loras", "4", modules=True) as process:
        before = usage_of(process)
        verdict, seconds = asyncio.run(_storm(site.world, process, num_clients))
        asyncio.run(_quiet(process))
        after = usage_of(process)
    return {
        "clients": num_clients,
        "seconds": round(seconds, 1),
        "canary_answers": verdict.num_right,
        "canary_faults": verdict.faults[:5],
        "descriptors": [before["descriptors"], after["descriptors"]],
        "threads": [before["threads"], after["threads"]],
    }


async def _storm(world: World, process: ServerProcess, num_clients: int) -> tuple[Verdict, float]:
    verdict, is_over, canaries = Verdict(), asyncio.Event(), Canaries(world.questions)

    async def sing() -> None:
        while not is_over.is_set():
            await canaries.round(process.url, verdict)

    singing, started = asyncio.create_task(sing()), time.monotonic()
    left = iter(range(num_clients))
    await asyncio.gather(*(_hang_up_again_and_again(process, left, seed) for seed in range(16)))
    seconds = time.monotonic() - started
    is_over.set()
    await singing
    await canaries.round(process.url, verdict)
    return verdict, seconds


async def _hang_up_again_and_again(process: ServerProcess, left: Iterator[int], seed: int) -> None:
    generator = random.Random(seed)
    for _ in left:
        await hang_up(process.port, generator)


async def hang_up(
    port: int, generator: random.Random, name: str | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """One request, left at a moment by chance: in its head, its body, its queue, its first or later tokens.

    `name`: who is asked; None: any adapter of the canaries' world.
    """
    tenant = generator.choice(("acme", "globex", "hooli", "initech"))
    asked = name or f"{tenant}/{generator.choice('ab')}"
    fields = {"model": asked, "prompt": "x", "max_tokens": 60, "ignore_eos": True}
    body = json.dumps({**fields, "stream": generator.random() < 0.7, "n": generator.choice((1, 1, 3))}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    lines = "".join(f"\r\n{field}: {value}" for field, value in (headers or {}).items())
    request = (head + lines).encode() + b"\r\n\r\n" + body
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request[: generator.choice((len(request), len(request), len(request), 50, len(request) - 3))])
        with suppress(TimeoutError):
            async with asyncio.timeout(generator.random() * 0.05):
                await reader.read(generator.choice((1, 300, 5000)))
        writer.transport.abort()


async def _quiet(process: ServerProcess) -> None:
    """Return once nothing runs any more."""
    async with asyncio.timeout(60):
        while (stats := await get(process, "/admin/engine"))["num_running"] or stats["num_waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)  # connections are closed a moment after their rows


def overload(site: Site, num_requests: int = 1000) -> dict[str, Any]:
    """Ten times and more of what may wait, all at once."""
    with site.server("overload", "--max-loras", "4", "--max-queue", "64", modules=True) as process:
        statuses = asyncio.run(_flood(process, num_requests))
        verdict = Verdict()
        asyncio.run(Canaries(site.world.questions).round(process.url, verdict))
    counts = {str(status): statuses.count(status) for status in sorted(set(statuses))}
    return {"requests": num_requests, "statuses": counts, "canary_faults": verdict.faults[:5]}


async def _flood(process: ServerProcess, num_requests: int) -> list[int]:
    async with aiohttp.ClientSession(process.url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> int:
            body = {"model": ("acme/a", "globex/b", BASE)[number % 3], "prompt": "flood", "max_tokens": 16}
            async with session.post("/v1/completions", json=body) as response:
                await response.read()
                return response.status

        return await asyncio.gather(*(one(number) for number in range(num_requests)))
