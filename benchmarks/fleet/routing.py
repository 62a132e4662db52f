"""What routing by adapters saves: adapter loads with this server's router against the power of two choices.

    python -m benchmarks.fleet.routing [--routers affinity two_choices] [--adapters 64] [--slots 4] [--requests 1000]
                                       [--rounds 2] [--out FILE.json] [--flags ...]

64 adapters over 2 replicas with 4 slots each and host memory for 32 each, Zipf 1.1, a closed loop of 16 users, 32
tokens an answer; the same requests in the same order for every router, each on a server of its own, in turn. Counted
are the loads into slots and into host memory of all replicas (GET /admin/fleet: tiers) between the end of a warm round
and the end. The power of two choices is what Ray Serve does by itself: of two replicas drawn by lot, the one with fewer
requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.site import BASE, Site, add_arguments, engine_flags, made_site
from benchmarks.fleet.status import loads_of
from benchmarks.fleet.verdict import first_token_p95
from benchmarks.http_load import planned
from benchmarks.report import RESULTS, machine, percentiles
from benchmarks.workload import Load, make_jobs
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.workload import Plan, Target

VOCABULARY = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--routers", nargs="+", default=["affinity", "two_choices"], help="the first against the others"
    )
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet-routing.json")
    add_arguments(parser, replicas=2)
    options = parser.parse_args(arguments)
    rounds: dict[str, list[dict[str, Any]]] = {router: [] for router in options.routers}
    with made_site(options.adapters, options.scratch) as site:
        for seed in range(options.rounds):
            for router in options.routers:
                rounds[router].append(one_round(site, router, seed, options))
                print(router, rounds[router][-1], flush=True)
    report = {
        "machine": machine(),
        "command": "python -m benchmarks.fleet.routing " + shlex.join(arguments or sys.argv[1:]),
        "compared": {other: compared(rounds[options.routers[0]], rounds[other]) for other in options.routers[1:]},
        "rounds": rounds,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["compared"]))
    return 0


def one_round(site: Site, router: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """A server with this router, warmed by a fifth of the requests."""
    engine = engine_flags(options.engine, options.replicas, ["--router", router] if options.engine == "ray" else [])
    more = [
        "--max-loras",
        str(options.slots),
        "--max-cpu-loras",
        str(options.adapters // 2),
        "--max-num-seqs",
        "8",
        *site.modules,
        *options.flags,
    ]
    with site.server(f"router-{router}-{seed}", engine, *more) as server:
        target = Target(server.url, BASE)
        _asked(target, site, options, options.requests // 5, seed + 1000)
        before = loads_of(server.url)
        result = _asked(target, site, options, options.requests, seed)
        loads = {tier: count - before[tier] for tier, count in loads_of(server.url).items()}
    return {
        **{f"{tier}_loads_per_1000": round(1000 * n / len(result.records), 1) for tier, n in loads.items()},
        "ttft_ms": percentiles([record.first_token for record in result.answered]),
        "ttft_p95_ms": round(1000 * first_token_p95(result.answered), 1),
        "output_tokens_per_s": round(result.output_tokens_per_s, 1),
        "failed": len(result.failed),
    }


def _asked(target: Target, site: Site, options: argparse.Namespace, count: int, seed: int) -> Any:
    load = Load(count, options.users, 16, 64, 32, seed)
    jobs = make_jobs(load, "skewed", list(site.adapters), VOCABULARY)
    return asyncio.run(run_load(target, Plan([planned(job, load.output_tokens) for job in jobs], options.users)))


def compared(ours: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds of the ratios, ours by the other's."""
    names = ("device_loads_per_1000", "host_loads_per_1000", "ttft_p95_ms", "output_tokens_per_s")
    return {
        name: round(statistics.median(a[name] / max(b[name], 1e-9) for a, b in zip(ours, others, strict=True)), 3)
        for name in names
    }


if __name__ == "__main__":
    sys.exit(main())
