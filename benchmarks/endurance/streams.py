"""Ten thousand streams that are open and wait for their turn, and as many connections that say nothing."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from benchmarks.reliability.site import ADMIN, KEY, Site, get, usage_of
from benchmarks.report import percentiles
from lora_serve.commands.server_process import HOST, ServerProcess
from tests.canary.questions import BASE

NUM_ASKED = 40
AT_ONCE = 100  # that come in at the same time
PER_ADDRESS = 5_000  # streams from one loopback address: a client has some 28 000 ports on each
SPARE = 600  # descriptors of either process besides
PATIENCE = 180.0


def streams(site: Site, count: int = 10_000) -> dict[str, Any]:
    """Both kinds, each on a server of its own. Raises SystemExit if this process may not open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + SPARE:
        raise SystemExit(f"{count} streams need {count + SPARE} descriptors; this process may have {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + SPARE), hard))
    found = {"waiting": _measure(site, count, _waiting), "silent": _measure(site, count, _silent)}
    print(f"streams: {found}", flush=True)
    return found


Opened = Callable[[ServerProcess, int], Awaitable[asyncio.StreamWriter]]


def _measure(site: Site, count: int, open_one: Opened) -> dict[str, Any]:
    flags = (
        "--max-connections", str(count + 100), "--max-queue", str(count + 100), "--policy", "fair",
        "--auth", "on", "--max-num-seqs", "2", "--keep-alive-timeout", "3600", "--write-timeout", "3600",
    )  # fmt: skip
    with site.server(f"streams{open_one.__name__}", *flags) as process:
        return asyncio.run(_run(process, count, open_one))


async def _run(process: ServerProcess, count: int, open_one: Opened) -> dict[str, Any]:
    key = await _key(process)
    alone, before = await _ask(process, key), usage_of(process)
    writers = await _all_open(process, count, open_one)
    waiting = (await get(process, "/admin/engine"))["num_waiting"]
    meanwhile, full = await _ask(process, key), usage_of(process)
    after = await _all_gone(process, writers, before)
    again = await _all_gone(process, await _all_open(process, count, open_one), before)
    return {
        "streams": count,
        "waiting": waiting,
        "open": int(full["descriptors"] - before["descriptors"]),
        "bytes_of_memory_for_each": round((full["memory"] - before["memory"]) * 2**20 / count),
        "bytes_left_by_each_again": round((again["memory"] - after["memory"]) * 2**20 / count),
        "memory_mib": [round(usage["memory"], 1) for usage in (before, full, after, again)],
        "descriptors": [usage["descriptors"] for usage in (before, full, after)],
        "answer_ms_before": percentiles(alone),
        "answer_ms_meanwhile": percentiles(meanwhile),
    }


async def _all_open(process: ServerProcess, count: int, open_one: Opened) -> list[asyncio.StreamWriter]:
    writers = list[asyncio.StreamWriter]()
    for first in range(0, count, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, count))
        writers += await asyncio.gather(*(open_one(process, number) for number in numbers))
    return writers


async def _all_gone(
    process: ServerProcess, writers: list[asyncio.StreamWriter], before: dict[str, float]
) -> dict[str, float]:
    """Usage once they are closed and nothing waits."""
    for writer in writers:
        writer.transport.abort()
    return await _until_left(process, before["descriptors"] + 8)


async def _connected(process: ServerProcess, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, process.port, local_addr=(f"127.0.1.{1 + number // PER_ADDRESS}", 0))


async def _waiting(process: ServerProcess, number: int) -> asyncio.StreamWriter:
    """A stream of the default tenant, queued: two rows run at a time, each for 90 tokens."""
    _, writer = await _connected(process, number)
    body = json.dumps({"model": BASE, "prompt": [7], "max_tokens": 90, "ignore_eos": True, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


async def _silent(process: ServerProcess, number: int) -> asyncio.StreamWriter:
    """A connection that was answered once and is kept."""
    reader, writer = await _connected(process, number)
    writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return writer


async def _key(process: ServerProcess) -> dict[str, str]:
    """The header of a tenant that has nothing to do with the streams."""
    async with aiohttp.ClientSession(process.url, headers=ADMIN) as session:
        async with session.post("/admin/tenants", json={"name": "another"}) as answer:
            assert answer.status == 201, await answer.text()
        async with session.post("/admin/tenants/another/keys", json={}) as answer:
            return {"Authorization": f"Bearer {(await answer.json())['secret']}"}


async def _ask(process: ServerProcess, key: dict[str, str]) -> list[float]:
    """Seconds of new requests of that tenant, each on a new connection."""
    seconds, timeout = [], aiohttp.ClientTimeout(PATIENCE)
    for _ in range(NUM_ASKED):
        started = time.perf_counter()
        async with aiohttp.ClientSession(process.url, headers=key, timeout=timeout) as session:
            body = {"model": BASE, "prompt": [7, 8], "max_tokens": 2}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
        seconds.append(time.perf_counter() - started)
    return seconds


async def _until_left(process: ServerProcess, descriptors: float) -> dict[str, float]:
    """Usage once the streams are gone and nothing waits."""
    deadline = time.monotonic() + PATIENCE
    while (usage := usage_of(process))["descriptors"] > descriptors or await _waits(process):
        assert time.monotonic() < deadline, usage
        await asyncio.sleep(0.1)
    return usage


async def _waits(process: ServerProcess) -> bool:
    return bool((await get(process, "/admin/engine"))["num_waiting"])
