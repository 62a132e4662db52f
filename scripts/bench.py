#!/usr/bin/env python3
"""The same closed-loop load against this server and against PEFT's static batches, alternating in one run.

64 requests, 16 at a time, prompts of 16-256 random tokens, 64 new tokens, greedy; 16 adapters of ranks 8/16/32 on
all linear layers of a Llama shape of about 135M random weights, checkpoints in bfloat16 (made once, kept in
.benchmarks/). Popularities: base only, one adapter for all, and 16 adapters shuffled evenly. PEFT runs in bfloat16
and in float32, and the faster one counts. Both engines stay loaded, one works at a time; medians over the rounds.

    scripts/bench.py                     everything; writes benchmarks/results/latest.json
    scripts/bench.py --quick             minutes instead of an hour: for a look, not for figures
    scripts/bench.py --peft-dtypes --popularity base uniform      this server only
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks folder is no part of the installed package

from benchmarks.checkpoints import SHAPES, VOCAB_SIZE, make_checkpoints, num_weight_bytes  # noqa: E402
from benchmarks.http_load import run_http  # noqa: E402
from benchmarks.peft_baseline import PeftWorker  # noqa: E402
from benchmarks.report import OURS, Run, machine, ratios, same_first_token, write_report  # noqa: E402
from benchmarks.workload import POPULARITIES, Job, Load, Measured, make_jobs  # noqa: E402
from lora_serve.model import onednn  # noqa: E402
from lora_serve.server_process import HOST, ServerFailedError, ServerProcess  # noqa: E402

BASE = "bench-base"
KV_CACHE_BYTES = 512 * 2**20
Engine = Callable[[list[Job], Load], Measured]


def main() -> int:
    options = parse_options()
    load = Load(
        options.requests, options.concurrency, 16, options.max_prompt_tokens, options.output_tokens, options.seed
    )
    print(f"making the checkpoints under {options.cache.name}/ ...", flush=True)
    model, adapters = make_checkpoints(options.cache, options.shape, options.adapters, options.seed)
    with tempfile.TemporaryDirectory(prefix="lora_serve_bench_") as folder:
        arguments = server_arguments(options, model, adapters, Path(folder) / "store")
        with ServerProcess(arguments, Path(folder) / "server.log") as server:
            started = time.perf_counter()
            server.wait_until_ready(600)
            start_seconds = {OURS: round(time.perf_counter() - started, 1)}
            workers = {f"peft-{dtype}": PeftWorker(model, adapters, dtype) for dtype in options.peft_dtypes}
            start_seconds |= {name: round(worker.start_seconds, 1) for name, worker in workers.items()}
            engines: dict[str, Engine] = {OURS: lambda jobs, load: run_http(server.url, BASE, jobs, load)}
            engines |= {name: worker.run for name, worker in workers.items()}
            try:
                runs, agreement = measure(engines, load, list(adapters), options)
            finally:
                for worker in workers.values():
                    worker.close()
            memory = server_memory(server, Path(folder) / "store", model, options.dtype)
    return report(options, load, runs, {"start_s": start_seconds, "memory": memory, "same_first_token": agreement})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="135m", help="of the model")
    parser.add_argument("--requests", type=int, default=64, help="requests per popularity and round")
    parser.add_argument("--concurrency", type=int, default=16, help="requests under way at once; PEFT's batch size")
    parser.add_argument("--output-tokens", type=int, default=64, help="new tokens per request")
    parser.add_argument("--max-prompt-tokens", type=int, default=256, help="prompts have 16 to so many tokens")
    parser.add_argument("--adapters", type=int, default=16, help="number of adapters")
    parser.add_argument("--popularity", nargs="+", choices=POPULARITIES, default=list(POPULARITIES[:3]))
    parser.add_argument("--rounds", type=int, default=2, help="repetitions; medians are reported")
    parser.add_argument("--peft-dtypes", nargs="*", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--dtype", default="auto", help="the server's --dtype")
    parser.add_argument("--server-flags", default="", help="more flags for the server, in one string")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and the adapters' order")
    parser.add_argument("--quick", action="store_true", help="16 requests of 16 new tokens, one round")
    parser.add_argument("--name", default="latest", help="benchmarks/results/NAME.json")
    parser.add_argument("--cache", type=Path, default=ROOT / ".benchmarks", help="folder of the checkpoints")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.output_tokens, options.rounds = 16, 16, 1
    return options


def server_arguments(options: argparse.Namespace, model: Path, adapters: dict[str, Path], store: Path) -> list[str]:
    arguments = ["--model", str(model), "--served-model-name", BASE, "--dtype", options.dtype, "--store", str(store)]
    arguments += ["--max-loras", str(max(16, len(adapters))), "--kv-cache-memory", str(KV_CACHE_BYTES)]
    arguments += ["--no-enable-prefix-caching"]  # every round sends the same prompts, and PEFT computes them each time
    for name, folder in adapters.items():
        arguments += ["--lora-modules", f"{name}={folder}"]
    return arguments + shlex.split(options.server_flags)


def measure(
    engines: dict[str, Engine], load: Load, adapters: list[str], options: argparse.Namespace
) -> tuple[list[Run], dict[str, float]]:
    """Every engine on every popularity, round by round; the rows beside a popularity are close in time."""
    short = Load(max(load.concurrency, len(adapters)), load.concurrency, 16, 32, 4, load.seed + 1)
    for engine in engines.values():
        engine(make_jobs(short, "uniform", adapters, VOCAB_SIZE), short)
    runs: list[Run] = []
    agreement: dict[str, float] = {}
    for number in range(options.rounds):
        for popularity in options.popularity:
            jobs = make_jobs(load, popularity, adapters, VOCAB_SIZE)
            results = {}
            for name, engine in engines.items():
                results[name] = engine(jobs, load)
                runs.append(Run.of(name, popularity, results[name]))
                print(f"round {number + 1}: {runs[-1].line()}", flush=True)
            ours = results.pop(OURS)
            agreement |= {f"{popularity}, {name}": same_first_token(ours, theirs) for name, theirs in results.items()}
    return runs, agreement


def server_memory(server: ServerProcess, store: Path, model: Path, dtype: str) -> dict[str, Any]:
    """Peak resident bytes of the server (VmHWM) beside what it was asked to hold: weights, KV budget, adapters."""
    status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    if dtype == "auto":
        dtype = "bfloat16" if onednn.multiplies_bfloat16() else "float32"
    engine = get_json(server, "/admin/engine", (store / "admin_key").read_text().strip())
    parts = {
        "weights": num_weight_bytes(model) * (2 if dtype == "float32" else 1),  # the checkpoint is bfloat16
        "kv_cache": KV_CACHE_BYTES,
        # on a CPU the device's and the host's copies are the same bytes
        "adapters": max(tier["num_bytes"] for tier in engine["tiers"].values()),
    }
    return {"dtype": dtype, "peak_rss": peak, **parts, "beyond": peak - sum(parts.values())}


def get_json(server: ServerProcess, path: str, key: str) -> Any:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=30)
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    return json.loads(connection.getresponse().read())


def report(options: argparse.Namespace, load: Load, runs: list[Run], facts: dict[str, Any]) -> int:
    print("\nratios (medians of", options.rounds, "rounds)")
    for name, value in ratios(runs).items():
        print(f"  {name:40} {value}")
    sizes = {name: f"{size / 2**20:.0f} MiB" for name, size in facts["memory"].items() if name != "dtype"}
    print(f"\nserver memory in {facts['memory']['dtype']}: {sizes}")
    command = " ".join(["scripts/bench.py", *(argument for argument in sys.argv[1:] if not argument.startswith("/"))])
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    file = ROOT / "benchmarks" / "results" / f"{options.name}.json"
    settings = {field: getattr(load, field) for field in Load.__dataclass_fields__}
    write_report(file, {"date": date, "command": command, "load": settings, "machine": machine(), **facts}, runs)
    print(f"\nwritten: {file.relative_to(ROOT)}")
    return 1 if any(run.failed for run in runs) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerFailedError as error:
        sys.exit(str(error))
