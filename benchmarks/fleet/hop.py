"""What the way over Ray costs: a gateway with one replica against `--engine process`, the same load, round by round.

    python -m benchmarks.fleet.hop [--models demo 38m] [--rows 1 8 16] [--rounds 5] [--requests 96] [--out FILE.json]
        [--flags ...]

Both servers are up all the time and are asked in turn, who begins changes with each round; a warm round before counts
for nothing. `ratio`: the median over the rounds of the fleet's output tokens per second by the other's; `later_ms`: of
the difference of the median first token. Processor time is of all processes of a server, Ray's own among them; what
the idle one used meanwhile is `idle_cores`. A step of the demo's model takes 1 to 3 ms; models of random weights
(`lora_serve/random_weights/`) take longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet.site import BASE, DEMO, Site, add_arguments, engine_flags, made_site
from benchmarks.http_load import planned
from benchmarks.peers.processes import cpu_seconds, peak_rss
from benchmarks.report import RESULTS, machine, percentiles
from benchmarks.workload import Load, make_jobs
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.report import LoadResult, percentile
from lora_serve.commands.bench.workload import Plan, Target
from lora_serve.commands.server_process import ServerProcess
from lora_serve.random_weights import SHAPES

NUM_ADAPTERS = 8
VOCABULARY = 2000
AGAINST = "process"


@dataclass(frozen=True, slots=True)
class Round:
    """One load on one server."""

    tokens_per_s: float
    first_token: float  # the median, seconds
    cpu_ms_per_token: float
    num_failed: int
    idle_cores: float  # of the other server meanwhile
    first_tokens: tuple[float, ...]
    gaps: tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[DEMO], choices=[DEMO, *SHAPES])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="users of the closed loops")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=96, help="of a round with 8 users or more")
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet-hop.json")
    add_arguments(parser, replicas=1)
    options = parser.parse_args(arguments)
    runs = [run for model in options.models for run in _runs(model, options)]
    report = {
        "machine": machine(),
        "command": "python -m benchmarks.fleet.hop " + shlex.join(arguments or sys.argv[1:]),
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(runs, indent=1))
    return 0


def _runs(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One for each number of rows; memory is of all of them so far."""
    found = []
    with made_site(NUM_ADAPTERS, options.scratch, model) as site, ExitStack() as stack:
        more = [*site.modules, "--max-num-seqs", "16", "--max-loras", str(NUM_ADAPTERS), *options.flags]
        kinds = {AGAINST: engine_flags(AGAINST, 1), options.engine: engine_flags(options.engine, options.replicas)}
        servers = {kind: stack.enter_context(_server(site, kind, flags, more)) for kind, flags in kinds.items()}
        for rows in options.rows:
            run = {"model": model, **_measure(servers, rows, options)}
            found.append({**run, "peak_rss": {kind: peak_rss(server.pid) for kind, server in servers.items()}})
    return found


def _server(site: Site, kind: str, flags: Sequence[str], more: Sequence[str]) -> Any:
    return site.server(kind, flags, *more, "--store", str(site.root / f"store-{kind}"))


def _measure(servers: Mapping[str, ServerProcess], rows: int, options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[Round]] = {kind: [] for kind in servers}
    names = list(servers)
    for number in range(-1, options.rounds):
        for kind in (names, names[::-1])[number % 2]:
            found = _round(
                servers, kind, rows, number, options.requests if rows >= 8 else max(8, options.requests // 6)
            )
            if number >= 0:
                rounds[kind].append(found)
            print(
                f"{rows} rows, {kind}: {found.tokens_per_s:.0f} tokens/s, {found.first_token * 1000:.1f} ms", flush=True
            )
    return {
        "rows": rows,
        **compared(rounds[options.engine], rounds[AGAINST]),
        **{k: _told(r) for k, r in rounds.items()},
    }


def compared(fleet: Sequence[Round], other: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds, each a pair that was measured side by side."""
    pairs = list(zip(fleet, other, strict=True))
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "later_ms": round(statistics.median(1000 * (a.first_token - b.first_token) for a, b in pairs), 2),
        "cpu_ratio": round(statistics.median(a.cpu_ms_per_token / b.cpu_ms_per_token for a, b in pairs), 3),
        "failed": sum(a.num_failed + b.num_failed for a, b in pairs),
    }


def _told(rounds: Sequence[Round]) -> dict[str, Any]:
    return {
        "output_tokens_per_s": [round(one.tokens_per_s, 1) for one in rounds],
        "cpu_ms_per_token": [round(one.cpu_ms_per_token, 3) for one in rounds],
        "idle_cores_of_the_other": [round(one.idle_cores, 3) for one in rounds],
        "ttft_ms": percentiles([seconds for one in rounds for seconds in one.first_tokens]),
        "itl_ms": percentiles([seconds for one in rounds for seconds in one.gaps]),
    }


def _round(servers: Mapping[str, ServerProcess], kind: str, rows: int, seed: int, num_requests: int) -> Round:
    load = Load(num_requests, rows, 16, 96, 64, seed + 1)
    jobs = make_jobs(load, "uniform", [f"tenant{index % 8}/a{index:03d}" for index in range(NUM_ADAPTERS)], VOCABULARY)
    before = {name: cpu_seconds(server.pid) for name, server in servers.items()}
    plan = Plan([planned(job, load.output_tokens) for job in jobs], rows)
    result = asyncio.run(run_load(Target(servers[kind].url, BASE), plan))
    used = {name: cpu_seconds(server.pid) - before[name] for name, server in servers.items()}
    return round_of(result, used[kind], sum(used.values()) - used[kind])


def round_of(result: LoadResult, cpu: float, idle_cpu: float) -> Round:
    """Processor seconds of the server, and of the other one."""
    num_tokens = sum(record.output_tokens for record in result.records)
    first = sorted(record.first_token for record in result.answered)
    return Round(
        result.output_tokens_per_s,
        percentile(first, 50),
        1000 * cpu / max(1, num_tokens),
        len(result.failed),
        idle_cpu / result.seconds,
        tuple(first),
        tuple(gap for record in result.answered for gap in record.gaps),
    )


if __name__ == "__main__":
    sys.exit(main())
