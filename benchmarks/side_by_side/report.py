"""The report of a side by side: its JSON, and its table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.side_by_side.figures import Run, medians, ratios

MEBI = 2**20


def make_report(facts: Mapping[str, Any], engines: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> dict[str, Any]:
    """`facts` first; then engines, also those that could not run, ratios, medians and every run."""
    found = medians(runs)
    return {
        **facts,
        "engines": list(engines),
        "ratios": ratios(found),
        "medians": [asdict(median) for median in found],
        "runs": [asdict(run) for run in runs],
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Rows are engines, columns popularities: output tokens/s, time to first token and inter-token time as p50."""
    popularities = list(dict.fromkeys(median["popularity"] for median in report["medians"]))
    cells = {(median["engine"], median["popularity"]): median for median in report["medians"]}
    measured = [
        engine for engine in report["engines"] if any((engine["engine"], name) in cells for name in popularities)
    ]
    lines = [["engine", *popularities, "peak RSS", "start"], ["---"] * (len(popularities) + 3)]
    for engine in measured:
        row = [_cell(cells.get((engine["engine"], popularity))) for popularity in popularities]
        memory, start = f"{engine['peak_rss'] / MEBI / 1024:.1f} GiB", f"{engine['start_s']:.0f} s"
        lines.append([engine["engine"], *row, memory, start])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join(part for part in (table, _ratio_lines(report), _missing(report, measured)) if part)


def _cell(median: Mapping[str, Any] | None) -> str:
    if median is None:
        return "-"
    failed = f", {median['failed']} failed" if median["failed"] else ""
    first, between = median["ttft_ms"]["p50"] / 1000, median["itl_ms"]["p50"]
    return f"{median['output_tokens_per_s']:.0f}, {first:.1f} s, {between:.0f} ms{failed}"


def _ratio_lines(report: Mapping[str, Any]) -> str:
    told = []
    for popularity, found in report["ratios"].items():
        parts = [f"{found['times the best peer']} times {found['best peer']}"] if "best peer" in found else []
        if "share of base-only kept" in found:
            parts.append(f"{found['share of base-only kept']} of base-only kept")
        if parts:
            told.append(f"- {popularity}: {', '.join(parts)}")
    return "\n".join(told)


def _missing(report: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> str:
    others = [engine for engine in report["engines"] if engine not in measured]
    return "\n".join(f"- not measured: {engine['engine']}: {engine['status']}, {engine['reason']}" for engine in others)
