"""`lora-serve simulate`: policies and routers compared on a trace, without a model.

Prints a table; --json writes every figure. Exit codes: 0, 1 if requests never end (a bug), 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lora_serve.core.setting_types import names_in
from lora_serve.simulate.fleet import Scenario, StalledError, Summary, table
from lora_serve.simulate.profiles import profile_names, read_profile
from lora_serve.simulate.workload import WorkloadConfig, read_trace


def run(arguments: Sequence[str]) -> int:
    """Simulates the trace once per policy and router and returns the exit code. Raises ConfigError."""
    options = build_parser().parse_args(arguments)
    scenario, rows = build_scenario(options), read_trace(options.trace)
    arrivals = scenario.arrivals(rows)
    summaries: list[Summary] = []
    try:
        for policy in options.policy:
            for router in options.router:
                started = time.perf_counter()
                summaries.append(scenario.run(arrivals, policy, router))
                sys.stderr.write(f"{policy}, {router}: {time.perf_counter() - started:.1f} s\n")
    except StalledError as error:
        sys.stderr.write(f"{policy}, {router}: {error}\n")
        return 1
    sys.stdout.write(f"{scenario.profile.name}: {scenario.profile.source}\n\n{table(summaries)}")
    if options.json is not None:
        facts = {"profile": scenario.profile.name, "workload": asdict(scenario.workload), "trace": options.trace.name}
        report = {**facts, "num_replicas": scenario.num_replicas, "runs": [asdict(run) for run in summaries]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lora-serve simulate", description=__doc__)
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="Azure 2023 CSV, Mooncake JSONL, or a Vidur CSV of lengths")
    add("--profile", default="llama-8b-h100", help=f"one of {', '.join(profile_names())}, or a JSON file")
    policies, routers = list(names_in("engine/policies")), list(names_in("routing/routers"))
    add("--policy", nargs="+", choices=policies, default=policies, help="default: all")
    add("--router", nargs="+", choices=routers, default=routers, help="default: all")
    add("--replicas", type=_positive, default=1)
    add("--gateways", type=_positive, default=1, help="doors that do not know each other's requests")
    add("--requests", type=_positive, default=2000)
    add("--rate", type=_above_zero, help="requests per second of the whole fleet; default: the trace's own")
    add("--adapters", type=_positive, default=1000)
    add("--tenants", type=_positive, default=100)
    add("--zipf", type=float, default=1.0, help="exponent of the adapters' popularity; 0: uniform")
    add("--flood", type=_share, default=0.0, help="share of the requests that one tenant sends beside its own")
    add("--urgent", type=_share, default=0.0, help="share of the requests with priority -1")
    add("--timeout-ms", type=_above_zero, help="deadline of every request, from its arrival; default: none")
    add("--shared-prefix", type=int, default=0, help="tokens with which all prompts of one adapter begin")
    add("--warm-share", type=_share, default=0.2, help="of the requests, the first, that are in no latency")
    add("--slots", type=_positive, help="device slots per replica; default: the profile's")
    add("--max-num-seqs", type=_positive, help="default: the profile's")
    add("--max-num-batched-tokens", type=_positive, help="default: the profile's")
    add("--host-memory", type=_positive, help="bytes for adapters in host memory per replica; default: the profile's")
    add("--max-queue", type=_positive, default=100_000, help="waiting requests per replica")
    add("--batch-wait-ms", type=float, default=0.0)
    add("--max-wait-ms", type=_above_zero, default=10_000.0, help="after which nobody may overtake a request")
    add("--no-prefix-caching", action="store_true", help="where no prompts share a beginning: the same, but faster")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="file for all figures")
    return parser


def build_scenario(options: argparse.Namespace) -> Scenario:
    """The scenario that the arguments describe. Raises ConfigError."""
    profile = read_profile(options.profile).changed(
        max_loras=options.slots,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        host_bytes=options.host_memory,
    )
    workload = WorkloadConfig(
        num_requests=options.requests,
        rate=options.rate,
        num_adapters=options.adapters,
        num_tenants=options.tenants,
        zipf=options.zipf,
        flood=options.flood,
        urgent=options.urgent,
        timeout=options.timeout_ms and options.timeout_ms / 1e3,
        shared_prefix=options.shared_prefix,
        seed=options.seed,
    )
    return Scenario(
        profile,
        workload,
        options.replicas,
        options.warm_share,
        options.max_queue,
        options.batch_wait_ms / 1e3,
        options.max_wait_ms / 1e3,
        enable_prefix_caching=not options.no_prefix_caching,
        num_gateways=options.gateways,
    )


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _above_zero(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
