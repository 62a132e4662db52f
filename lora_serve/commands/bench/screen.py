"""Shows a progress bar during a run and tables after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lora_serve.commands.bench.report import processor_words
from lora_serve.commands.bench.result import RequestRecord
from lora_serve.commands.output import Output, plain

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
    table = Table(show_header=False, box=None, pad_edge=False)
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
    for name, value in rows.items():
        if value:
            table.add_row(plain(name), plain(value))
    return table


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
