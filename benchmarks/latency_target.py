"""Latency targets against fixed limits, under a load that doubles and halves, on the real server.

    python -m benchmarks.latency_target [--shape 4m] [--seconds 15] [--ttft-ms T] [--itl-ms T] [--out FILE.json]

Open loop: Poisson arrivals at `--rate` of the capacity (measured first by a closed loop), twice that, and again as
before, `--seconds` each. The same requests are sent under fixed chunks and windows, and with either target and with
both set and the limits left open. p95 per phase, without its first seconds. Targets that are not given are measured: an
inter-token time of 2.4 times the p50 of the closed loop, and a first token of five times that. Writes FILE.json and
FILE.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES
from benchmarks.http_load import run_http
from benchmarks.open_loop import Outcome, poisson_times, run_open
from benchmarks.plots import plot_targets
from benchmarks.report import machine, percentiles
from benchmarks.tuned_server import BASE, TunedServer, tuned_server
from benchmarks.workload import Load

FACTORS = (1.0, 2.0, 1.0)
SETTLING = 3.0  # seconds of a phase that do not count
PATIENCE = 5.0  # seconds after the last arrival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4m")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=0.4, help="part of the capacity, in the first and last phase")
    parser.add_argument("--ttft-ms", type=float, help="target of the p95 of time to first token")
    parser.add_argument("--itl-ms", type=float, help="target of the p95 of inter-token time")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/latency-target.json"))
    options = parser.parse_args()
    load = Load(48, 12, 64, 256, options.output_tokens)
    with tuned_server(options.cache, options.shape, options.adapters) as server:
        capacity = server.capacity(load)
        ttft, itl = _targets(server, load, options)
        print(f"capacity {capacity:.1f} requests/s, targets: first token {ttft} ms, inter-token {itl} ms")
        rate, seconds = options.rate * capacity, options.seconds
        runs = {
            name: _run(server, load, settings, rate, seconds) for name, settings in _settings(ttft, itl).items()
        }  # fmt: skip
    facts = {
        "machine": machine(), "shape": options.shape, "phase_seconds": seconds, "adapters": options.adapters,
        "capacity_requests_per_s": round(capacity, 2), "requests_per_s": [round(f * rate, 2) for f in FACTORS],
        "ttft_target_ms": ttft, "itl_target_ms": itl,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts | {"runs": runs}, indent=1) + "\n")
    plot_targets(facts, runs, options.out.with_suffix(".png"))


def _targets(server: TunedServer, load: Load, options: argparse.Namespace) -> tuple[float, float]:
    measured = run_http(server.url, BASE, server.jobs(load.num_requests, load), load)
    p50 = percentiles([gap for sample in measured.samples for gap in sample.gaps])["p50"]
    itl = options.itl_ms or round(2.4 * p50, 1)
    return options.ttft_ms or round(5 * itl, 1), itl


def _settings(ttft: float, itl: float) -> dict[str, dict[str, float]]:
    return {
        "512 tokens": {},
        "64 tokens": {"max_num_batched_tokens": 64},
        "512 tokens, window of the target": {"batch_wait_ms": ttft},
        "target of the first token": {"batch_wait_ms": ttft, "latency_target_ms": ttft},
        "target of the inter-token time": {"inter_token_target_ms": itl},
        "both targets": {"batch_wait_ms": ttft, "latency_target_ms": ttft, "inter_token_target_ms": itl},
    }


def _run(server: TunedServer, load: Load, settings: dict[str, float], rate: float, seconds: float) -> dict[str, Any]:
    server.tune(**settings)
    before = server.engine()["num_steps"]
    times = poisson_times(lambda at: rate * FACTORS[min(2, int(at / seconds))], 3 * seconds, seed=2)
    jobs = server.jobs(len(times), load)
    outcomes = asyncio.run(run_open(server.url, BASE, jobs, times, load.output_tokens, PATIENCE))
    after = server.engine()
    phases = [_phase([o for o in outcomes if i * seconds + SETTLING <= o.at < (i + 1) * seconds]) for i in range(3)]
    print(f"{settings}: " + "; ".join(f"TTFT p95 {p['ttft_p95_ms']} ITL p95 {p['itl_p95_ms']}" for p in phases))
    print(f"  {after['batcher']['reason']}", flush=True)
    return {
        "settings": settings, "phases": phases, "unanswered": sum(o.sample is None for o in outcomes),
        "num_steps": after["num_steps"] - before, "batcher": after["batcher"],
    }  # fmt: skip


def _phase(outcomes: list[Outcome]) -> dict[str, Any]:
    samples = [outcome.sample for outcome in outcomes if outcome.sample is not None]
    return {
        "requests": len(outcomes),
        "ttft_p95_ms": _p95([sample.first_token for sample in samples]),
        "itl_p95_ms": _p95([gap for sample in samples for gap in sample.gaps]),
    }


def _p95(seconds: list[float]) -> float | None:
    ordered = sorted(seconds)
    return round(1000 * ordered[int(0.95 * (len(ordered) - 1) + 0.5)], 2) if ordered else None


if __name__ == "__main__":
    main()
