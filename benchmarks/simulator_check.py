"""The simulator against a real server on one small workload: throughput and TTFT p50 within a tolerance.

    python -m benchmarks.simulator_check [--model demo|135m] [--rate 4] [--requests 60] [--profile FILE] [--out FILE]

First steps and loads of this machine are recorded (benchmarks/record_steps.py; `--profile` takes older ones), then a
server is started and sent the first requests of the Azure code trace over HTTP, prompts cut to 200 tokens and answers
to 24, at the trace's distances scaled to `--rate`. The same requests go through the simulator with the server's limits.
Exit code 1 if a ratio is off by more than `--tolerance`. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.http_load import send
from benchmarks.record_steps import MAX_ROWS, checkpoints, profile_text, record_profile
from benchmarks.report import machine
from benchmarks.workload import Job, Sample
from lora_serve.commands.bench.sending import open_session
from lora_serve.commands.server_process import ServerProcess
from lora_serve.simulate.fleet import Scenario, SimulatedFleet, percentiles
from lora_serve.simulate.profiles import Profile, read_profile
from lora_serve.simulate.workload import Arrival, TraceRow, WorkloadConfig, read_trace

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "benchmarks" / "traces" / "azure_code_2023_cut.csv"
BASE = "bench-base"
MAX_PROMPT, MAX_OUTPUT, MAX_MODEL_LEN = 200, 24, 512
FIRST_TOKEN_ID = 10  # below are special tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "135m"), default="demo")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300, help="to record")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.25)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "simulator-check.json")
    options = parser.parse_args()
    model, folders = checkpoints(options.model, options.cache)
    with tempfile.TemporaryDirectory() as scratch:
        file = options.profile or Path(scratch) / "profile.json"
        if options.profile is None:
            file.write_text(profile_text(record_profile(options.model, options.steps, options.cache)))
        profile = read_profile(str(file))
        arrivals = make_arrivals(profile, len(folders), options)
        simulated = simulate(profile, arrivals)
        measured = measure(model, folders, arrivals, Path(scratch))
    report = compare(simulated, measured, options.tolerance)
    facts = {"machine": machine(), "model": options.model, "rate": options.rate, "requests": options.requests}
    options.out.write_text(json.dumps({**facts, **report}, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if report["is_within_tolerance"] else 1


def make_arrivals(profile: Profile, num_adapters: int, options: argparse.Namespace) -> list[Arrival]:
    rows = [
        TraceRow(row.time, min(row.num_prompt, MAX_PROMPT), min(row.num_output, MAX_OUTPUT))
        for row in read_trace(TRACE)[: options.requests]
    ]
    workload = WorkloadConfig(options.requests, options.rate, num_adapters, num_tenants=1)
    return Scenario(profile, workload).arrivals(rows)


def simulate(profile: Profile, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Every adapter was used once before, as on the server."""
    firsts = {arrival.adapter: arrival for arrival in reversed(arrivals)}
    warm = [
        replace(first, index=-1 - number, time=float(number), num_prompt=16, num_output=1)
        for number, first in enumerate(firsts.values())
    ]
    start = len(warm) + 10.0
    scenario = Scenario(profile, WorkloadConfig(len(arrivals)))
    fleet = SimulatedFleet(profile, scenario.engine_config("fcfs"), "hash", 1)
    fleet.run([*warm, *(replace(arrival, time=start + arrival.time) for arrival in arrivals)])
    outcomes = [outcome for outcome in fleet.recorder.outcomes if outcome.index >= 0]
    first = [outcome.first_token - outcome.arrival for outcome in outcomes if outcome.first_token is not None]
    seconds = max(outcome.end for outcome in outcomes) - start
    return figures(first, sum(outcome.num_output for outcome in outcomes), seconds)


def measure(model: Path, folders: Sequence[Path], arrivals: Sequence[Arrival], scratch: Path) -> dict[str, Any]:
    """A real server, one connection per request."""
    names = [f"bench/{folder.name}" for folder in folders]
    arguments = [
        "--model", str(model), "--served-model-name", BASE, "--store", str(scratch / "store"),
        "--max-loras", str(MAX_ROWS), "--max-num-seqs", str(MAX_ROWS), "--max-model-len", str(MAX_MODEL_LEN),
        "--kv-cache-memory", str(2**28), "--lora-modules",
        *(f"{name}={folder}" for name, folder in zip(names, folders, strict=True)),
    ]  # fmt: skip
    with ServerProcess(arguments, scratch / "server.log") as server:
        server.wait_until_ready(600)
        return asyncio.run(_send_all(server.url, names, arrivals))


async def _send_all(url: str, names: Sequence[str], arrivals: Sequence[Arrival]) -> dict[str, Any]:
    async with open_session() as http:
        for name in names:
            await send(http, url, BASE, Job((FIRST_TOKEN_ID,) * 16, name), 1, check=False)
        start = time.perf_counter()
        tasks = [_send_at(http, url, start, names, arrival) for arrival in arrivals]
        samples = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - start
    num_tokens = sum(arrival.num_output for arrival in arrivals)  # the end of a text is ignored
    return figures([sample.first_token for sample in samples], num_tokens, seconds)


async def _send_at(
    http: aiohttp.ClientSession, url: str, start: float, names: Sequence[str], arrival: Arrival
) -> Sample:
    await asyncio.sleep(max(0.0, start + arrival.time - time.perf_counter()))
    adapter = names[int(arrival.adapter.name.rpartition("/a")[2])]
    prompt = tuple(FIRST_TOKEN_ID + (arrival.index * 7 + place) % 200 for place in range(arrival.num_prompt))
    return await send(http, url, BASE, Job(prompt, adapter), arrival.num_output, check=False)


def figures(first: Sequence[float], num_tokens: int, seconds: float) -> dict[str, Any]:
    return {"ttft_s": percentiles(first), "output_tokens_per_s": num_tokens / seconds, "seconds": seconds}


def compare(simulated: dict[str, Any], measured: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Ratios are simulated to measured."""
    ratios = {
        "ttft_p50": simulated["ttft_s"]["p50"] / measured["ttft_s"]["p50"],
        "output_tokens_per_s": simulated["output_tokens_per_s"] / measured["output_tokens_per_s"],
    }
    is_within = all(1 / (1 + tolerance) <= ratio <= 1 + tolerance for ratio in ratios.values())
    return {
        "simulated": simulated,
        "measured": measured,
        "ratios": ratios,
        "tolerance": tolerance,
        "is_within_tolerance": is_within,
    }


if __name__ == "__main__":
    sys.exit(main())
