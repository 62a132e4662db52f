"""Figures out of samples: one run, medians over rounds, ratios between engines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.table import OURS
from benchmarks.report import percentiles
from benchmarks.workload import Measured


@dataclass(frozen=True, slots=True)
class Run:
    """One engine on one popularity, once."""

    engine: str
    family: str
    popularity: str
    round: int
    requests: int
    failed: int
    seconds: float
    output_tokens_per_s: float
    ttft_ms: dict[str, float]  # p50, p90, p99
    itl_ms: dict[str, float]

    @classmethod
    def of(cls, engine: str, family: str, popularity: str, number: int, measured: Measured) -> Run:
        num_tokens = sum(sample.num_tokens for sample in measured.samples)
        return cls(
            engine,
            family,
            popularity,
            number,
            len(measured.samples) + measured.num_failed,
            measured.num_failed,
            round(measured.seconds, 3),
            round(num_tokens / measured.seconds, 2) if measured.seconds else 0.0,
            percentiles([sample.first_token for sample in measured.samples]),
            percentiles([gap for sample in measured.samples for gap in sample.gaps]),
        )

    def line(self) -> str:
        return (
            f"{self.engine:22} {self.popularity:10} {self.output_tokens_per_s:8.1f} tokens/s   "
            f"TTFT p50 {self.ttft_ms['p50']:8.0f} p99 {self.ttft_ms['p99']:8.0f} ms   "
            f"ITL p50 {self.itl_ms['p50']:7.1f} p99 {self.itl_ms['p99']:7.1f} ms   {self.seconds:6.1f} s"
            + (f"   {self.failed} FAILED" if self.failed else "")
        )


@dataclass(frozen=True, slots=True)
class Median:
    """One engine on one popularity over all rounds."""

    engine: str
    family: str
    popularity: str
    rounds: int
    failed: int  # requests of all rounds
    output_tokens_per_s: float
    least: float  # output tokens/s of the slowest round
    most: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]


def medians(runs: Sequence[Run]) -> list[Median]:
    """In the order in which they were first measured."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.engine, run.popularity), []).append(run)
    return [_median(group) for group in groups.values()]


def _median(group: Sequence[Run]) -> Median:
    first, speeds = group[0], [run.output_tokens_per_s for run in group]
    return Median(
        first.engine,
        first.family,
        first.popularity,
        len(group),
        sum(run.failed for run in group),
        statistics.median(speeds),
        min(speeds),
        max(speeds),
        {share: statistics.median(run.ttft_ms[share] for run in group) for share in first.ttft_ms},
        {share: statistics.median(run.itl_ms[share] for run in group) for share in first.itl_ms},
    )


def ratios(found: Sequence[Median]) -> dict[str, dict[str, float | str]]:
    """Of output tokens/s, per popularity: ours to each peer's and the best one's, and the share of base-only kept."""
    ours = {median.popularity: median.output_tokens_per_s for median in found if median.family == OURS}
    return {popularity: _ratios(popularity, speed, ours, found) for popularity, speed in ours.items()}


def _ratios(
    popularity: str, speed: float, ours: Mapping[str, float], found: Sequence[Median]
) -> dict[str, float | str]:
    told: dict[str, float | str] = {}
    if ours.get("base") and popularity != "base":
        told["share of base-only kept"] = round(speed / ours["base"], 3)
    peers = {
        median.engine: median.output_tokens_per_s
        for median in found
        if median.popularity == popularity and median.family != OURS and median.output_tokens_per_s
    }
    told |= {f"times {engine}": round(speed / theirs, 2) for engine, theirs in peers.items()}
    if peers:
        best = max(peers, key=lambda engine: peers[engine])
        told |= {"best peer": best, "times the best peer": round(speed / peers[best], 2)}
    return told


def same_first_token(ours: Measured, theirs: Measured) -> float:
    """The share of requests whose first token both engines agree on: evidence that they did the same work.

    Random weights make near-ties, which rounding decides; so 1.0 is not to be expected between dtypes.
    """
    first = {sample.index: sample.token_ids[:1] for sample in theirs.samples}
    pairs = [(sample.token_ids[:1], first[sample.index]) for sample in ours.samples if sample.index in first]
    return round(sum(a == b for a, b in pairs) / max(1, len(pairs)), 3)
