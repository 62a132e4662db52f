"""One tenant floods, the others go on as ever: what they feel of it, by scheduling policy.

    python -m benchmarks.fairness [--policies fcfs fair] [--seconds 12] [--rounds 3] [--flood 0.5] [--others 0.4]

A real server on the demo model. The capacity is measured first, in requests per second, by a closed loop that keeps
every row busy. Then, for each policy in a server of its own, the same steady traffic of the other tenants (together
`--others` of the capacity) is sent in windows in turn: alone, and beside a tenant that sends `--flood` of it in bursts.
Reported per policy: p50 and p99 of the others' time to first token in both windows, how much p99 grew, and the tokens
that they were given within the window with the flood against those without (1: all that they asked for, as max-min
fairness gives to whoever asks for less than an equal share). JSON and, with matplotlib installed, a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import machine
from benchmarks.tenant_load import Answered, Stream, Work, closed_loop, open_loop
from lora_serve.commands.demo import DATA, adapter_folders
from lora_serve.commands.server_process import ServerProcess

BASE = "demo-base"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["fcfs", "fair"])
    parser.add_argument("--seconds", type=float, default=12.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=3, help="of both windows, in turn")
    parser.add_argument("--flood", type=float, default=0.5, help="of the capacity, by the flooding tenant")
    parser.add_argument("--others", type=float, default=0.4, help="of the capacity, by the others together")
    parser.add_argument("--burst", type=int, default=8, help="requests of the flood that come at once")
    parser.add_argument("--tenants", type=int, default=8, help="the flooding one included")
    parser.add_argument("--rows", type=int, default=16, help="--max-num-seqs")
    parser.add_argument("--step-tokens", type=int, default=128, help="--max-num-batched-tokens")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fairness.json"))
    options = parser.parse_args()
    vocab_size = json.loads((DATA / "model" / "config.json").read_text())["vocab_size"]
    work = Work(options.prompt_tokens, options.output_tokens, vocab_size)
    adapters = _adapters(options.tenants)
    capacity, rows = 0.0, {}
    for policy in options.policies:
        with tempfile.TemporaryDirectory() as scratch, _server(options, policy, adapters, Path(scratch)) as server:
            server.wait_until_ready(120)
            found = asyncio.run(closed_loop(server.url, list(adapters), work, options.rows, options.seconds / 3))
            capacity = capacity or found  # the same load for all; the others are only warmed by it
            rows[policy] = _measure(server.url, list(adapters), work, capacity, options)
        print(policy, json.dumps(rows[policy]["others"]), flush=True)
    load = {
        name: getattr(options, name)
        for name in ("flood", "others", "burst", "seconds", "rounds", "tenants", "rows", "step_tokens")
    }
    report = {
        "machine": machine(), "capacity_requests_per_s": round(capacity, 2), "load": load,
        "prompt_tokens": work.prompt_tokens, "output_tokens": work.output_tokens, "policies": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    _plot(rows, options.out.with_suffix(".png"))


def _adapters(num_tenants: int) -> dict[str, Path]:
    """One adapter of each of so many demo tenants."""
    by_tenant = {name.partition("/")[0]: (name, folder) for name, folder in adapter_folders().items()}
    return dict(list(by_tenant.values())[:num_tenants])


def _server(options: argparse.Namespace, policy: str, adapters: dict[str, Path], folder: Path) -> ServerProcess:
    arguments = [
        "--model", str(DATA / "model"), "--served-model-name", BASE, "--store", str(folder / "store"),
        "--max-num-seqs", str(options.rows), "--max-num-batched-tokens", str(options.step_tokens),
        "--max-loras", str(len(adapters)), "--policy", policy,
        "--no-enable-prefix-caching", "--max-queue", "100000",
    ]  # fmt: skip
    for name, path in adapters.items():
        arguments += ["--lora-modules", f"{name}={path}"]
    return ServerProcess(arguments, folder / "log")


def _measure(
    url: str, adapters: Sequence[str], work: Work, capacity: float, options: argparse.Namespace
) -> dict[str, Any]:
    flooding, *others = adapters
    rate = options.others * capacity / len(others)
    steady = [Stream(name.partition("/")[0], name, rate) for name in others]
    flood_rate = options.flood * capacity
    burst = max(1, min(options.burst, int(flood_rate * options.seconds / 3)))  # several in a window
    flood = Stream(flooding.partition("/")[0], flooding, flood_rate, burst)
    quiet, flooded = list[Answered](), list[Answered]()
    for seed in range(options.seed, options.seed + options.rounds):
        quiet += asyncio.run(open_loop(url, steady, work, options.seconds, seed))
        flooded += asyncio.run(open_loop(url, [*steady, flood], work, options.seconds, seed))
    return _figures(quiet, flooded, flood.tenant, options.seconds)


def _figures(quiet: Sequence[Answered], flooded: Sequence[Answered], flooder: str, seconds: float) -> dict[str, Any]:
    others = [answered for answered in flooded if answered.tenant != flooder]
    before, after = _first_tokens(quiet), _first_tokens(others)
    tokens_before, tokens_after = _tokens_within(quiet, seconds), _tokens_within(flooded, seconds)
    shares = {name: round(tokens_after[name] / max(count, 1), 3) for name, count in tokens_before.items()}
    return {
        "others": {
            "num_requests": len(others),
            "failed": sum(not answered.tokens for answered in (*quiet, *others)),
            "quiet_ttft_ms": before,
            "flooded_ttft_ms": after,
            "p99_growth": round(after["p99"] / before["p99"], 2),
            "tokens_of_quiet": shares,
            "least_tokens_of_quiet": min(shares.values()),
        },
        "flooder_ttft_ms": _first_tokens([answered for answered in flooded if answered.tenant == flooder]),
        "tokens_within": {"quiet": dict(tokens_before), "flooded": dict(tokens_after)},
    }


def _first_tokens(answers: Sequence[Answered]) -> dict[str, float]:
    times = [1000 * answered.first_token for answered in answers if answered.tokens]
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {f"p{percent}": round(cuts[percent - 1], 1) for percent in (50, 90, 99)}


def _tokens_within(answers: Sequence[Answered], seconds: float) -> Counter[str]:
    counts: Counter[str] = Counter()
    for answered in answers:
        counts[answered.tenant] += sum(moment <= seconds for moment in answered.tokens)
    return counts


def _plot(rows: dict[str, dict[str, Any]], file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot, as matplotlib is not installed")
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for offset, window in ((-0.2, "quiet"), (0.2, "flooded")):
        heights = [row["others"][f"{window}_ttft_ms"]["p99"] for row in rows.values()]
        left.bar([index + offset for index in range(len(rows))], heights, 0.4, label=window)
    left.set(title="others: p99 time to first token, ms", xticks=range(len(rows)), xticklabels=list(rows))
    left.legend()
    heights = [row["others"]["least_tokens_of_quiet"] for row in rows.values()]
    right.bar(range(len(rows)), heights, 0.5)
    right.axhline(0.9, linestyle="--", color="grey")
    right.set(title="others: tokens with the flood / without", xticks=range(len(rows)), xticklabels=list(rows))
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
