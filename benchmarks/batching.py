"""Throughput against latency, over the wait window and the batch size, on the real server.

    python -m benchmarks.batching [--shape 4m] [--seconds 5] [--rates 0.3 0.6 0.9] [--out FILE.json]

Open loop: Poisson arrivals at parts of the capacity, which is measured first by a closed loop. Each cell sends the same
requests under other limits, set by PUT /admin/engine: windows of 0, 5, 20 and 50 ms, batches of 1 to 32 rows without a
window, and preferred sizes that end a window of 50 ms. Writes FILE.json, and FILE.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES
from benchmarks.open_loop import Outcome, poisson_times, run_open
from benchmarks.plots import plot_batching
from benchmarks.report import machine, percentiles
from benchmarks.tuned_server import BASE, TunedServer, tuned_server
from benchmarks.workload import Load

SETTINGS: tuple[dict[str, float], ...] = (
    *({"batch_wait_ms": window} for window in (0, 5, 20, 50)),
    *({"max_num_seqs": rows} for rows in (1, 4, 16)),
    *({"batch_wait_ms": 50, "preferred_batch_size": rows} for rows in (2, 8)),
)
PATIENCE = 3.0  # seconds after the last arrival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4m")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each cell")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="parts of the capacity")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/batching.json"))
    options = parser.parse_args()
    load = Load(48, 24, 16, 64, options.output_tokens)
    with tuned_server(options.cache, options.shape, options.adapters) as server:
        capacity = server.capacity(load)
        print(f"capacity: {capacity:.1f} requests/s")
        cells = [
            _cell(server, load, settings, rate, rate * capacity, options.seconds)
            for settings in SETTINGS
            for rate in options.rates
        ]
    facts = {
        "machine": machine(), "shape": options.shape, "seconds": options.seconds, "adapters": options.adapters,
        "prompt_tokens": [load.min_prompt_tokens, load.max_prompt_tokens], "output_tokens": options.output_tokens,
        "capacity_requests_per_s": round(capacity, 2),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts | {"cells": cells}, indent=1) + "\n")
    plot_batching(cells, options.out.with_suffix(".png"))


def _cell(
    server: TunedServer, load: Load, settings: dict[str, float], part: float, rate: float, seconds: float
) -> dict[str, Any]:
    server.tune(**settings)
    before = server.engine()
    times = poisson_times(lambda at: rate, seconds, seed=1)
    jobs = server.jobs(len(times), load)
    outcomes = asyncio.run(run_open(server.url, BASE, jobs, times, load.output_tokens, PATIENCE))
    cell = {"settings": settings, "rate": part, "requests_per_s": round(rate, 2)}
    cell |= _figures(outcomes, seconds) | _work(before, server.engine(), len(times))
    print(
        f"{settings!s:55} rate {part}: {cell['output_tokens_per_s']:7.1f} tokens/s  TTFT p50 {cell['ttft_ms']['p50']:7}"
        f" p90 {cell['ttft_ms']['p90']:7}  ITL p90 {cell['itl_ms']['p90']:6}  steps per request"
        f" {cell['steps_per_request']:5}  {cell['unanswered']} unanswered",
        flush=True,
    )
    return cell


def _figures(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Tokens that came before the last arrival count for the throughput; of what was cut off, none."""
    samples = [(outcome.at, outcome.sample) for outcome in outcomes if outcome.sample is not None]
    num_tokens = sum(_tokens_before(seconds - at, sample.first_token, sample.gaps) for at, sample in samples)
    return {
        "requests": len(outcomes),
        "unanswered": len(outcomes) - len(samples),
        "output_tokens_per_s": round(num_tokens / seconds, 1),
        "ttft_ms": percentiles([sample.first_token for _, sample in samples]),
        "itl_ms": percentiles([gap for _, sample in samples for gap in sample.gaps]),
    }


def _tokens_before(end: float, first: float, gaps: tuple[float, ...]) -> int:
    count, at = 0, first
    for gap in (*gaps, 0.0):
        if at > end:
            break
        count, at = count + 1, at + gap
    return count


def _work(before: dict[str, Any], after: dict[str, Any], num_requests: int) -> dict[str, float]:
    steps, seconds = (after[name] - before[name] for name in ("num_steps", "step_seconds"))
    return {"steps_per_request": round(steps / max(1, num_requests), 2), "step_seconds": round(seconds, 3)}


if __name__ == "__main__":
    main()
