"""The simulator's figures: rewrites the tables and plots of docs/explanation/simulation.md.

    python -m benchmarks.simulation [--only NAME ...] [--traces DIR] [--scale 1.0] [--redraw]

Every policy and every router that there is takes part. Takes about ten minutes of one core per policy; `--only` runs
some of the comparisons and keeps the others' figures, `--scale` takes a part of the requests, `--redraw` runs none.
Needs matplotlib (the extra `plots`). `--traces`: a folder with the whole Azure files; without it the cuts in
benchmarks/traces are run through again and again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from lora_serve.core.setting_types import names_in
from lora_serve.simulate.figures import Fairness
from lora_serve.simulate.fleet import Scenario, Summary, table
from lora_serve.simulate.profiles import read_profile
from lora_serve.simulate.workload import FLOOD, OTHERS, URGENT, TraceRow, WorkloadConfig, read_trace

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "simulation.json"
DOCUMENT = ROOT / "docs" / "explanation" / "simulation.md"
LARGE = read_profile("llama-8b-h100")
FEW_SLOTS = LARGE.changed(max_loras=8)
SMALL_TIERS = LARGE.changed(max_loras=4, host_bytes=32 * LARGE.adapter_bytes)
POLICIES, ROUTERS = names_in("engine/policies"), names_in("routing/routers")
SWEPT_RATES = (60.0, 120.0, 180.0, 210.0)  # of 16 replicas, requests per second


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs on the same requests; `rates`, `seeds`: once for each, else the scenario's own."""

    trace: str  # "code" or "conv"
    scenario: Scenario
    policies: Sequence[str] = ("fcfs",)
    routers: Sequence[str] = ("affinity",)
    rates: Sequence[float] = ()
    seeds: Sequence[int] = ()


COMPARISONS: dict[str, Callable[[], Comparison]] = {
    "routers": lambda: Comparison(
        "code",
        Scenario(LARGE, WorkloadConfig(20_000, 640.0, 10_000, 1_000, seed=1), 64, warm_share=0.5),
        routers=ROUTERS,
    ),
    "tiers": lambda: Comparison(
        "code",
        Scenario(SMALL_TIERS, WorkloadConfig(1_200, 4.0, 64, 16, zipf=1.1), 2, warm_share=0.4),
        routers=("affinity", "two_choices"),  # of two replicas, two choices are all there are
        seeds=(1, 2, 3),
    ),
    "sweep": lambda: Comparison(
        "code",
        Scenario(LARGE, WorkloadConfig(5_000, None, 2_500, 250, seed=1), 16),
        routers=ROUTERS,
        rates=SWEPT_RATES,
    ),
    "fleet": lambda: Comparison(
        "code", Scenario(LARGE, WorkloadConfig(20_000, 850.0, 10_000, 1_000), 64), policies=POLICIES
    ),
    "flood": lambda: Comparison(
        "conv", Scenario(LARGE, WorkloadConfig(2_000, 60.0, 200, 20, flood=0.5), 4), policies=POLICIES
    ),
    "slots": lambda: Comparison(
        "code", Scenario(FEW_SLOTS, WorkloadConfig(3_000, 48.0, 1_000, 100, zipf=0.8), 4), policies=POLICIES
    ),
    "urgent": lambda: Comparison(
        "conv",
        Scenario(LARGE, WorkloadConfig(1_500, 60.0, 200, 20, urgent=0.1, timeout=10.0), 4),
        policies=POLICIES,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--traces", type=Path, help="folder of AzureLLMInferenceTrace_{code,conv}_2023.csv")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--redraw", action="store_true", help="from the figures of the last run")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [] if options.redraw else options.only:
        results[name] = run(name, COMPARISONS[name](), options.traces, options.scale)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), results))
    draw(results)


def run(name: str, comparison: Comparison, traces: Path | None, scale: float = 1.0) -> dict[str, Any]:
    """Its figures as JSON."""
    workload = comparison.scenario.workload
    workload = replace(workload, num_requests=int(scale * workload.num_requests))
    rows = read_rows(comparison.trace, traces)
    runs = []
    for rate, seed in product(comparison.rates or (workload.rate,), comparison.seeds or (workload.seed,)):
        workload = replace(workload, rate=rate, seed=seed)
        # no prompt of these traces is another's beginning: without the cache, the same figures in half the time
        scenario = replace(comparison.scenario, workload=workload, enable_prefix_caching=False)
        arrivals = scenario.arrivals(rows)
        for policy in comparison.policies:
            for router in comparison.routers:
                start = time.perf_counter()
                summary = scenario.run(arrivals, policy, router)
                seconds = round(time.perf_counter() - start, 1)
                runs.append({"rate": rate, "seed": seed, **asdict(summary)})
                print(f"{name}: {policy}, {router}, {rate}/s, seed {seed} took {seconds} s; {summary.ttft}", flush=True)
    facts = {"trace": comparison.trace, "num_trace_rows": len(rows), "num_replicas": comparison.scenario.num_replicas}
    profile = comparison.scenario.profile
    facts |= {"max_loras": profile.max_loras, "num_host": profile.host_bytes // profile.adapter_bytes}
    facts |= {"profile": profile.name}
    return {**facts, "workload": asdict(workload), "runs": runs}


def read_rows(trace: str, traces: Path | None) -> list[TraceRow]:
    if traces is not None:
        return read_trace(traces / f"AzureLLMInferenceTrace_{trace}_2023.csv")
    return read_trace(ROOT / "benchmarks" / "traces" / f"azure_{trace}_2023_cut.csv")


def with_tables(text: str, results: dict[str, Any]) -> str:
    """The document with its parts between `<!-- begin NAME -->` and `<!-- end -->` written anew."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return match[0] if name not in results else f"<!-- begin {name} -->\n\n{_part(results[name])}\n<!-- end -->"

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end -->", part, text, flags=re.DOTALL)


def _part(result: dict[str, Any]) -> str:
    figures = _rate_table(result) or _seed_table(result) or table(_summaries(result))
    return f"{_caption(result)}\n\n{figures}{_group_table(result)}"


def _caption(result: dict[str, Any]) -> str:
    workload, rates = result["workload"], {run["rate"] for run in result["runs"]}
    shown = f"{min(rates):g}" if len(rates) == 1 else f"{min(rates):g} to {max(rates):g}"
    extras = [f"{workload[key]:.0%} {words}" for key, words in _EXTRAS.items() if workload[key]]
    extras += [f"a deadline of {workload['timeout']:g} s"] if workload["timeout"] else []
    return (
        f"{workload['num_requests']} requests of the Azure {result['trace']} trace ({result['num_trace_rows']} rows) "
        f"at {shown} per second; {workload['num_adapters']} adapters of {workload['num_tenants']} tenants, Zipf "
        f"{workload['zipf']:g}; {result['num_replicas']} replicas of `{result['profile']}` with {result['max_loras']} "
        f"slots and room for {result['num_host']} in host memory each{''.join(f'; {extra}' for extra in extras)}."
    )


_EXTRAS = {"flood": "of the requests from one tenant more", "urgent": "of the requests urgent (priority -1)"}


def _summaries(result: dict[str, Any]) -> list[Summary]:
    runs = [{key: value for key, value in run.items() if key not in ("rate", "seed")} for run in result["runs"]]
    return [Summary(**{**run, "fairness": Fairness(**run["fairness"])}) for run in runs]


def _rate_table(result: dict[str, Any]) -> str:
    rates = sorted({run["rate"] for run in result["runs"]})
    if len(rates) == 1:
        return ""
    lines = ["| TTFT p99 s at requests/s | " + " | ".join(f"{rate:g}" for rate in rates) + " |"]
    lines.append("|" + " --- |" * (len(rates) + 1))
    for router in sorted({run["router"] for run in result["runs"]}):
        values = [run["ttft"]["p99"] for run in result["runs"] if run["router"] == router]
        lines.append(f"| {router} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    return "\n".join(lines) + "\n"


def _seed_table(result: dict[str, Any]) -> str:
    seeds = sorted({run["seed"] for run in result["runs"]})
    if len(seeds) == 1:
        return ""
    lines = ["| seed | router | host loads/1000 | slot loads/1000 | TTFT p50 s | TTFT p95 s | TTFT p99 s |"]
    lines.append("|" + " --- |" * 7)
    for run_ in result["runs"]:
        loads, times = (run_["host_loads_per_1000"], run_["slot_loads_per_1000"]), run_["ttft"]
        values = [f"{count:.0f}" for count in loads] + [f"{times[share]:.3f}" for share in ("p50", "p95", "p99")]
        lines.append(f"| {run_['seed']} | {run_['router']} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def _group_table(result: dict[str, Any]) -> str:
    """Of those who did not flood, and of those in a hurry."""
    groups = [group for group in (FLOOD, URGENT) if result["workload"][group]]
    if not groups:
        return ""
    groups.append(OTHERS)
    titles = [f"{group}: TTFT {share} s" for group in groups for share in ("p50", "p99")]
    lines = ["", "| policy | " + " | ".join(titles) + " |", "|" + " --- |" * (len(titles) + 1)]
    for run_ in result["runs"]:
        times = [run_["ttft_by_group"].get(group, {}) for group in groups]
        values = [f"{found[share]:.3f}" if found else "-" for found in times for share in ("p50", "p99")]
        lines.append(f"| {run_['policy']} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any]) -> None:
    """docs/explanation/simulation-*.png."""
    import matplotlib as mpl

    mpl.use("Agg")
    if "sweep" in results:
        _draw_sweep(results["sweep"])
    for name in ("routers", "fleet", "flood", "slots", "urgent"):
        if name in results:
            _draw_bars(name, results[name])


def _draw_sweep(result: dict[str, Any]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for router in sorted({run["router"] for run in result["runs"]}):
        runs = [run for run in result["runs"] if run["router"] == router]
        rates = [run["rate"] for run in runs]
        axes[0].plot(rates, [run["ttft"]["p99"] for run in runs], marker="o", label=router)
        axes[1].plot(rates, [100 * run["slot_hit_rate"] for run in runs], marker="o", label=router)
    axes[0].set(xlabel="requests per second", ylabel="TTFT p99, s", yscale="log")
    axes[1].set(xlabel="requests per second", ylabel="slot hits, %", ylim=(0, 100))
    axes[0].legend()
    _save(figure, "sweep")


def _draw_bars(name: str, result: dict[str, Any]) -> None:
    from matplotlib import pyplot

    key = "router" if len({run["router"] for run in result["runs"]}) > 1 else "policy"
    group = OTHERS if result["workload"]["flood"] else URGENT if result["workload"]["urgent"] else None
    labels = [run[key] for run in result["runs"]]
    found = [run["ttft_by_group"][group] if group else run["ttft"] for run in result["runs"]]
    whose = f" of {group}" if group else ""
    panels = {
        f"TTFT p50{whose}, s": [times["p50"] for times in found],
        f"TTFT p99{whose}, s": [times["p99"] for times in found],
        "slot hits, %": [100 * run["slot_hit_rate"] for run in result["runs"]],
        "max service gap, weighted tokens": [run["fairness"]["max_service_gap"] for run in result["runs"]],
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 3.2))
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.bar(labels, values)
        axis.set_title(title, fontsize=9)
        axis.tick_params(axis="x", rotation=25, labelsize=8)
    _save(figure, name)


def _save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "explanation" / f"simulation-{name}.png", dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    main()
