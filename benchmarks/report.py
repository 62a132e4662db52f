"""Figures out of samples, the table on the terminal, and the JSON under benchmarks/results/."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.workload import Measured
from lora_serve.commands.bench.figures import spread_ms
from lora_serve.commands.bench.machine import machine as bench_machine
from lora_serve.commands.bench.machine import versions

OURS = "lora_serve"
PACKAGES = ("torch", "transformers", "peft", "aiohttp")


@dataclass(frozen=True, slots=True)
class Run:
    """One engine on one popularity, once."""

    engine: str  # "lora_serve", "peft-bfloat16" or "peft-float32"
    popularity: str
    requests: int
    failed: int
    seconds: float
    output_tokens_per_s: float
    ttft_ms: dict[str, float]  # p50, p90, p99
    itl_ms: dict[str, float]

    @classmethod
    def of(cls, engine: str, popularity: str, measured: Measured) -> Run:
        num_tokens = sum(len(sample.token_ids) for sample in measured.samples)
        return cls(
            engine,
            popularity,
            len(measured.samples) + measured.num_failed,
            measured.num_failed,
            round(measured.seconds, 3),
            round(num_tokens / measured.seconds, 2),
            percentiles([sample.first_token for sample in measured.samples]),
            percentiles([gap for sample in measured.samples for gap in sample.gaps]),
        )

    def line(self) -> str:
        return (
            f"{self.engine:14} {self.popularity:10} {self.output_tokens_per_s:8.1f} tokens/s   "
            f"TTFT p50 {self.ttft_ms['p50']:8.0f} p99 {self.ttft_ms['p99']:8.0f} ms   "
            f"ITL p50 {self.itl_ms['p50']:7.1f} p99 {self.itl_ms['p99']:7.1f} ms"
            + (f"   {self.failed} FAILED" if self.failed else "")
        )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Seconds in, ms out: p50, p90, p99; zeros of nothing."""
    return {share: round(value, 2) for share, value in spread_ms(seconds).items() if share.startswith("p")}


def medians(runs: Sequence[Run]) -> list[Run]:
    """One run per engine and popularity: the median of each figure over the rounds."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.engine, run.popularity), []).append(run)
    return [_median(group) for group in groups.values()]


def _median(group: Sequence[Run]) -> Run:
    first = group[0]
    return Run(
        first.engine,
        first.popularity,
        first.requests,
        sum(run.failed for run in group),
        statistics.median(run.seconds for run in group),
        statistics.median(run.output_tokens_per_s for run in group),
        {share: statistics.median(run.ttft_ms[share] for run in group) for share in first.ttft_ms},
        {share: statistics.median(run.itl_ms[share] for run in group) for share in first.itl_ms},
    )


def ratios(runs: Sequence[Run]) -> dict[str, float]:
    """`ours/base` per popularity: the share of our base-only figure kept; `ours/peft`: against PEFT's faster dtype."""
    figures = {(run.engine, run.popularity): run.output_tokens_per_s for run in medians(runs)}
    found: dict[str, float] = {}
    for (engine, popularity), ours in figures.items():
        if engine != OURS:
            continue
        base = figures.get((OURS, "base"))
        if base and popularity != "base":
            found[f"{popularity}: share of base-only kept"] = round(ours / base, 3)
        others = [value for (other, same), value in figures.items() if other != OURS and same == popularity]
        if others:
            found[f"{popularity}: times PEFT"] = round(ours / max(others), 2)
    return found


def same_first_token(ours: Measured, theirs: Measured) -> float:
    """The share of requests whose first token both engines agree on: evidence that they did the same work.

    Random weights make near-ties, which rounding decides; so 1.0 is not to be expected between dtypes.
    """
    pairs = list(zip(ours.samples, theirs.samples, strict=False))
    return round(sum(a.token_ids[0] == b.token_ids[0] for a, b in pairs) / max(1, len(pairs)), 3)


def machine() -> dict[str, Any]:
    """What ran this: processor, memory, versions."""
    return {**bench_machine(), "versions": versions(PACKAGES)}


def write_report(file: Path, facts: dict[str, Any], runs: Sequence[Run]) -> None:
    """The whole run as JSON: facts, every run, medians, ratios."""
    report = {
        **facts,
        "ratios": ratios(runs),
        "medians": [asdict(run) for run in medians(runs)],
        "runs": [asdict(run) for run in runs],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n")
