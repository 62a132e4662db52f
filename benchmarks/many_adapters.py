"""Many adapters over a few slots: throughput against as many adapters as there are slots.

    python -m benchmarks.many_adapters [--shape 38m] [--adapters 200 1000] [--slots 8] [--rounds 5] [--out FILE.json]

One server per number of adapters, with `--slots` device slots and host memory for a fifth of the adapters. The same
prompts are sent in a closed loop, each round once per kind, in turn:
    few:  popularity uniform over as many adapters as there are slots (all of them stay on the device);
    many: popularity skewed (Zipf 1.1) over all adapters: slots change hands, host memory too, files are read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.checkpoints import SHAPES, VOCAB_SIZE, make_adapters, make_checkpoints
from benchmarks.http_load import run_http
from benchmarks.report import machine, percentiles
from benchmarks.storm import Site, register
from benchmarks.workload import Load, Measured, make_jobs
from lora_serve.commands.server_process import ServerProcess

ADMIN_KEY = "admin-key-of-the-bench"
BASE = "bench-base"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="38m")
    parser.add_argument("--adapters", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/many-adapters.json"))
    options = parser.parse_args()
    runs = [_measure(count, options) for count in options.adapters]
    options.out.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


def _measure(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds with so many adapters registered, on a server of their own."""
    model, _ = make_checkpoints(options.cache, options.shape, 0, seed=0)
    folders = make_adapters(options.cache, options.shape, count, seed=0, rank=16)
    one = sum(file.stat().st_size for file in next(iter(folders.values())).iterdir())
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "--model", str(model), "--served-model-name", BASE, "--admin-key", ADMIN_KEY,
            "--admin-acts-per-minute", "0",
            "--store", f"{scratch}/store",
            "--adapter-root", str(options.cache), "--max-loras", str(options.slots), "--max-num-seqs", "16",
            "--adapter-host-memory", str(one * count // 5), "--max-model-len", "512",
        ]  # fmt: skip
        with ServerProcess(arguments, Path(scratch) / "log") as server:
            server.wait_until_ready(120)
            started = time.perf_counter()
            asyncio.run(_register(server.url, folders))
            registered = time.perf_counter() - started
            print(f"{len(folders)} adapters registered in {registered:.0f} s")
            rounds = [_round(server.url, list(folders), options, seed) for seed in range(options.rounds)]
            engine = asyncio.run(_engine(server.url))
    return _summary(count, options, rounds, registered, engine, one)


def _round(url: str, names: list[str], options: argparse.Namespace, seed: int) -> dict[str, Measured]:
    load = Load(options.requests, options.concurrency, 16, 128, options.output_tokens, seed)
    kinds = {"few": ("uniform", names[: options.slots]), "many": ("skewed", names)}
    jobs = {kind: make_jobs(load, popularity, table, VOCAB_SIZE) for kind, (popularity, table) in kinds.items()}
    measured = {kind: run_http(url, BASE, jobs[kind], load) for kind in kinds}
    print("  ".join(f"{kind}: {_throughput(one):.1f} tokens/s" for kind, one in measured.items()))
    return measured


def _throughput(measured: Measured) -> float:
    return sum(len(sample.token_ids) for sample in measured.samples) / measured.seconds


async def _register(url: str, folders: dict[str, Path]) -> None:
    async with Site.at(url, ADMIN_KEY) as site:
        await register(site, folders)


async def _engine(url: str) -> Any:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with aiohttp.ClientSession(url) as http, http.get("/admin/engine", headers=headers) as answer:
        return await answer.json()


def _summary(
    count: int,
    options: argparse.Namespace,
    rounds: list[dict[str, Measured]],
    registered: float,
    engine: Any,
    one: int,
) -> dict[str, Any]:
    kinds = {}
    for kind in ("few", "many"):
        measured = [table[kind] for table in rounds]
        first = [sample.first_token for one_round in measured for sample in one_round.samples]
        gaps = [gap for one_round in measured for sample in one_round.samples for gap in sample.gaps]
        kinds[kind] = {
            "output_tokens_per_s": [round(_throughput(one_round), 1) for one_round in measured],
            "failed": sum(one_round.num_failed for one_round in measured),
            "ttft_ms": percentiles(first),
            "itl_ms": percentiles(gaps),
        }
    kept = [_throughput(table["many"]) / _throughput(table["few"]) for table in rounds]
    facts = {
        "shape": options.shape,
        "num_adapters": count,
        "adapter_bytes": one,
        "slots": options.slots,
        "requests": options.requests,
        "concurrency": options.concurrency,
        "output_tokens": options.output_tokens,
        "registration_seconds": round(registered, 1),
    }
    summary = {**facts, **kinds, "kept": round(statistics.median(kept), 3), "tiers": engine["tiers"]}
    print(f"kept with {count} adapters over {options.slots} slots: {summary['kept']}")
    return summary


if __name__ == "__main__":
    main()
