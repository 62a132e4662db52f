"""The first token of an adapter that is cold, by the tier that it comes from, split by phase.

    python -m benchmarks.cold_first_token [--shape 135m] [--repeats 7] [--out FILE.json]

A real server with its registry in a real redis-server, nothing else running. Before each request the adapter is put
back: device: nothing; host: out of its only slot, by a request for another; disk: evicted; own files: evicted, its
prepared file removed; redis: evicted, its blob on this machine removed. Medians in ms: what the client waits for the
first token, Server-Timing's parts, and the card's split of the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, make_adapters, make_checkpoints
from benchmarks.report import machine
from benchmarks.storm import Site, register
from lora_serve.commands.server_process import ServerProcess, free_port, is_port_free

ADMIN_KEY = "admin-key-of-the-bench"
TIERS = ("device", "host", "disk", "own files", "redis")
PROMPT = list(range(10, 26))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cold-first-token.json"))
    options = parser.parse_args()
    model, _ = make_checkpoints(options.cache, options.shape, 0, seed=0)
    folders = make_adapters(options.cache, options.shape, 2, seed=0, rank=16)
    with tempfile.TemporaryDirectory() as scratch, _redis(Path(scratch)) as redis_url:
        store = Path(scratch) / "store"
        arguments = [
            "--model", str(model), "--admin-key", ADMIN_KEY, "--admin-acts-per-minute", "0",
            "--store", str(store), "--adapter-root",
            str(options.cache), "--max-loras", "1", "--redis-url", redis_url, "--max-model-len", "512",
            "--no-enable-prefix-caching",
        ]  # fmt: skip
        with ServerProcess(arguments, Path(scratch) / "log") as server:
            server.wait_until_ready(120)
            figures = asyncio.run(_measure(server.url, store, folders, options.repeats))
    for tier, row in figures.items():
        print(f"{tier:10}", "  ".join(f"{name} {value:.1f}" for name, value in row.items()))
    report = {"machine": machine(), "shape": options.shape, "repeats": options.repeats, "median_ms": figures}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


async def _measure(url: str, store: Path, folders: dict[str, Path], repeats: int) -> dict[str, dict[str, float]]:
    async with Site.at(url, ADMIN_KEY) as site:
        await register(site, folders)
        wanted, other = folders
        digest = (await _card(site, wanted))["digest"].removeprefix("sha256:")
        blob = store / "cache" / "blobs" / digest
        figures = {}
        for tier in TIERS:
            rows = []
            for _ in range(repeats + 1):
                await _put_back(site, wanted, other, tier, blob)
                rows.append(await _first_token(site, wanted, with_load=tier not in ("device", "host")))
            figures[tier] = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
        return figures


async def _put_back(site: Site, wanted: str, other: str, tier: str, blob: Path) -> None:
    if tier == "device":
        return
    if tier == "host":
        await _first_token(site, other, with_load=False)
        return
    await site.post(f"/admin/adapters/{wanted}/evict", {})
    if tier == "redis":
        await asyncio.to_thread(shutil.rmtree, blob)
    elif tier == "own files":
        await asyncio.to_thread(_drop_prepared, blob)


def _drop_prepared(blob: Path) -> None:
    for file in blob.glob("prepared-*"):
        file.unlink()


async def _first_token(site: Site, name: str, *, with_load: bool) -> dict[str, float]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    start = time.perf_counter()
    async with site.http.post("/v1/completions", json=body, headers=site.admin) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                break
        row = {"first_token": 1000 * (time.perf_counter() - start)}
        for part in answer.headers["Server-Timing"].split(", "):
            phase, _, duration = part.partition(";dur=")
            if phase != "decode":
                row[phase] = float(duration)
        await answer.read()
    if with_load:
        load = (await _card(site, name))["last_load"]
        row |= {f"load_{phase}": value for phase, value in load.items() if phase != "tier"}
    return row


async def _card(site: Site, name: str) -> Any:
    async with site.http.get(f"/admin/adapters/{name}", headers=site.admin) as answer:
        return await answer.json()


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while is_port_free(port):
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
