"""A report for people: a progress bar during a run, tables and a picture after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lora_serve.commands.bench.report import LoadResult, RequestRecord, percentile, processor_words
from lora_serve.commands.output import Output, facts_table

LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between tokens",
    "chunk_gap_ms": "between arrivals",
    "e2e_ms": "whole answer",
}


@contextmanager
def progress_bar(output: Output, num_requests: int | None) -> Iterator[Callable[[RequestRecord], None]]:
    """A progress bar on a terminal's standard error; call the yielded function as each request ends."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    is_off = output.as_json or not output.notes.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=output.notes, transient=True, disable=is_off) as bar:
        task = bar.add_task("requests", total=num_requests)
        num_failed = 0

        def on_done(record: RequestRecord) -> None:
            nonlocal num_failed
            num_failed += record.error is not None
            bar.update(task, advance=1, description=f"requests, {num_failed} failed" if num_failed else "requests")

        yield on_done


def tables(report: Mapping[str, Any]) -> list[Table]:
    """The load and its throughput, then the latencies."""
    return [_facts(report), _latencies(report)]


def _facts(report: Mapping[str, Any]) -> Table:
    loop = f"{report['rate']:g} requests/s" if report["rate"] else f"{report['concurrency'] or 'any number'} at a time"
    rows = {
        "engine": f"{report['engine']}, model {report['model']}",
        "numbers": kernel_words(report["kernels"]),
        "processor": f"{processor_words(report['machine'])} (this machine)",
        "load": f"{report['popularity']}, {report['num_adapters']} adapters, {loop}, seed {report['seed']}",
        "requests": f"{report['requests']} in {report['duration_s']:.2f} s, {report['failed']} failed",
        "output tokens/s": f"{report['output_tokens_per_s']:,.1f} ({report['output_tokens']} tokens)",
        "prompt tokens/s": f"{report['prompt_tokens_per_s']:,.1f} ({report['prompt_tokens']} tokens)",
    }
    if report["goodput"] is not None:
        good = report["goodput"]
        levels = ", ".join(f"{name.removesuffix('_ms')} {limit:g} ms" for name, limit in good["slo"].items())
        rows["goodput"] = f"{good['requests_per_s']:g} requests/s, {100 * good['share']:.1f} % of all ({levels})"
    if report["ended_early"]:
        rows["ended early"] = f"{report['ended_early']} answers have fewer tokens than were asked for"
    if "chunks" in report["token_counts"]:
        rows["tokens"] = "the server tells no counts: each chunk is taken for one token"
    for name, num in report["errors"].items():
        rows[f"failed: {name}"] = f"{num}, as in: {report['error_examples'][name][:160]}"
    return facts_table((name, value) for name, value in rows.items() if value)


def kernel_words(kernels: Mapping[str, str]) -> str:
    """The type of numbers and the native kernels: "bfloat16, kernels amx (shipped)"; "": the server does not tell."""
    if not kernels:
        return ""
    return "{}, kernels {} ({})".format(*(kernels.get(name, "?") for name in ("dtype", "level", "source")))


def _latencies(report: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms")
    shares = ("p50", "p90", "p99", "mean", "max")
    for share in shares:
        table.add_column(share, justify="right")
    for name, label in LATENCIES.items():
        if name != "chunk_gap_ms" or report["tokens_per_chunk"] > 1.02:
            table.add_row(label, *(f"{report[name][share]:,.1f}" for share in shares))
    return table


INK, SOFT = "#22313f", "#7f8c8d"
BLUE, ORANGE, GREEN, RED = "#2f6db3", "#e08214", "#3a923a", "#c0392b"
MAX_BARS = 32


def draw_report(result: LoadResult, report: Mapping[str, Any], file: Path) -> None:
    """Draws the report's three charts. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.6), layout="constrained")
    FigureCanvasAgg(figure)
    first, between, over_time, adapters = figure.subplots(2, 2).flat
    figure.suptitle(_headline(report), fontsize=13, color=INK, fontweight="bold")
    answered = result.answered
    _distribution(first, "time to first token", "ms", [1000 * record.first_token for record in answered], BLUE)
    _distribution(
        between, "time between tokens", "ms", [1000 * gap for record in answered for gap in record.gaps], ORANGE
    )
    if report["tokens_per_chunk"] > 1.02:
        _curve(between, [1000 * gap for record in answered for gap in record.chunk_gaps], SOFT, "between arrivals")
    _over_time(over_time, report)
    _adapters(adapters, report["per_adapter"])
    figure.savefig(file, dpi=110)


def _headline(report: Mapping[str, Any]) -> str:
    load = f"{report['rate']:g} requests/s" if report["rate"] else f"{report['concurrency']} at a time"
    if not report["rate"] and not report["concurrency"]:
        load = "a trace's times"
    who = "base model only" if report["popularity"] == "base" else (
        f"{report['num_adapters']} adapters, {report['popularity']}"
    )  # fmt: skip
    failed = f", {report['failed']} FAILED" if report["failed"] else ""
    return (
        f"{report['engine']} on {report['model']}: {report['output_tokens_per_s']:,.1f} output tokens/s\n"
        f"{who}; {report['requests']} requests{failed}; {load}"
    )


def _style(part: Any, title: str) -> None:
    part.set_title(title, loc="left", fontsize=11, color=INK)
    part.grid(alpha=0.25)
    part.spines[["top", "right"]].set_visible(False)
    part.tick_params(colors=INK, labelsize=9)


def _distribution(part: Any, title: str, unit: str, values: list[float], colour: str) -> None:
    """The cumulative distribution up to the p99.9, with the median and the tail marked."""
    _style(part, f"{title}: share below x")
    part.set_xlabel(unit)
    part.set_ylim(0, 1.02)
    part.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    if not values:
        part.text(0.5, 0.5, "no answer", ha="center", transform=part.transAxes, color=SOFT)
        return
    ordered = _curve(part, values, colour, None)
    for share, style in ((50, "-"), (90, "--"), (99, ":")):
        value = percentile(ordered, share)
        part.axvline(value, color=colour, linestyle=style, linewidth=1, alpha=0.7, label=f"p{share}  {value:,.1f} ms")
    part.set_xlim(0, max(percentile(ordered, 99.9) * 1.05, 1e-3))
    _legend(part, "lower right")


def _curve(part: Any, values: Iterable[float], colour: str, label: str | None) -> list[float]:
    ordered = sorted(values)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    part.step([0, *ordered], [0, *shares], where="post", color=colour, linewidth=2, label=label)
    if label is not None:
        _legend(part, "lower right")
    else:
        part.fill_between([0, *ordered], [0, *shares], step="post", color=colour, alpha=0.08)
    return ordered


def _over_time(part: Any, report: Mapping[str, Any]) -> None:
    """Tokens per second as an area, requests under way as a line on an axis of their own."""
    _style(part, "over time")
    moments, speeds = zip(*report["tokens_over_time"], strict=True)
    part.fill_between(moments, speeds, step="mid", color=GREEN, alpha=0.25)
    part.step(moments, speeds, where="mid", color=GREEN, linewidth=1.6)
    part.set_xlabel("seconds")
    part.set_ylabel("output tokens/s", color=GREEN)
    part.set_ylim(0)
    part.set_xlim(0, max(report["duration_s"], 1e-3))
    right = part.twinx()
    times, counts = zip(*report["in_flight"], strict=True)
    right.step(times, counts, where="post", color=INK, linewidth=1.1, alpha=0.8)
    right.set_ylabel("requests under way", color=INK)
    right.set_ylim(0, 1.15 * max(1, *counts))
    right.spines[["top"]].set_visible(False)
    right.tick_params(colors=INK, labelsize=9)


def _adapters(part: Any, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Tokens per adapter as bars, the median and the p99 of its first token as dots."""
    shown = list(groups.items())[:MAX_BARS]
    more = f", the {len(shown)} most asked of {len(groups)}" if len(groups) > len(shown) else ""
    places = range(len(shown))
    failing = [place for place in places if shown[place][1]["failed"]]
    _style(part, f"per adapter{more}{', red where requests failed' if failing else ''}")
    part.bar(places, [group["output_tokens_per_s"] for _, group in shown], 0.75, color=BLUE, alpha=0.55)
    for place in failing:
        part.axvspan(place - 0.45, place + 0.45, color=RED, alpha=0.15)
    part.set_ylabel("output tokens/s", color=BLUE)
    part.set_xticks(list(places), [_short(name) for name, _ in shown], rotation=60, ha="right", fontsize=8)
    part.set_xlim(-0.6, max(len(shown), 4) - 0.4)
    right = part.twinx()
    medians, tails = ([group["ttft_ms"][share] for _, group in shown] for share in ("p50", "p99"))
    right.vlines(places, medians, tails, color=INK, linewidth=1, alpha=0.6)
    right.plot(places, medians, "o", color=INK, markersize=5, label="first token p50")
    right.plot(places, tails, "_", color=INK, markersize=9, label="first token p99")
    right.set_ylabel("time to first token, ms", color=INK)
    right.set_ylim(0, 1.3 * max(1e-3, *tails))
    right.spines[["top"]].set_visible(False)
    right.tick_params(colors=INK, labelsize=9)
    _legend(right, "upper right")


def _legend(part: Any, place: str) -> None:
    part.legend(loc=place, fontsize=9, facecolor="white", edgecolor="none", framealpha=0.85)


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"...{name[-16:]}"
