"""Runs a bench: prepares it, sends the load, writes the report."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from lora_serve.commands.bench.flags import num_spawned
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.preparation import Prepared, prepare
from lora_serve.commands.bench.report import RunFacts, make_report, write_report
from lora_serve.commands.bench.result import LoadResult
from lora_serve.commands.bench.screen import progress_bar, tables
from lora_serve.commands.bench.spawn import BASE, SpawnConfig, default_cache, spawned
from lora_serve.commands.failure import ExitCode
from lora_serve.commands.output import Output
from lora_serve.core.errors import ConfigError, how_to_install

NO_PICTURE = f"no report.png: matplotlib is not installed ({how_to_install('plots')})"


def run_spawned(flags: argparse.Namespace, output: Output, command: str) -> int:
    try:
        server_flags = tuple(shlex.split(flags.server_flags))
    except ValueError as error:
        raise ConfigError(f"--server-flags: {error}") from error
    cache = flags.cache or default_cache()
    config = SpawnConfig(flags.shape, num_spawned(flags), flags.ranks, cache, server_flags, flags.seed)
    output.note(f"a server on random weights of shape {config.shape} with {config.num_adapters} adapters ...")
    flags.model = flags.model or BASE
    with _ended_by_sigterm(), spawned(config) as server:
        facts = {"shape": config.shape, "ranks": list(config.ranks), "start_s": round(server.start_seconds, 2)}
        return run_against(flags, server.process.url, output, command, facts, server.peak_rss)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C, so that the spawned server ends too; only the main thread may do that."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_against(
    flags: argparse.Namespace,
    url: str,
    output: Output,
    command: str,
    server: dict[str, Any],
    peak_rss: Any = None,
) -> int:
    prepared, result = asyncio.run(_load(flags, url, output))
    if peak_rss is not None:
        server = {**server, "peak_rss_bytes": peak_rss()}
    report = make_report(result, _facts(flags, prepared, command, server), flags.slo)
    if flags.out is not None:
        _write(flags, result, report, output)
    output.show(report, *tables(report))
    return ExitCode.REFUSED if report["failed"] else ExitCode.OK


async def _load(flags: argparse.Namespace, url: str, output: Output) -> tuple[Prepared, LoadResult]:
    prepared = await prepare(flags, url)
    with progress_bar(output, prepared.workload.num_requests) as on_done:
        return prepared, await run_load(prepared.target, prepared.plan, on_done)


def _facts(flags: argparse.Namespace, prepared: Prepared, command: str, server: dict[str, Any]) -> RunFacts:
    return RunFacts(
        prepared.engine,
        prepared.target.model,
        prepared.workload.popularity,
        len(prepared.workload.adapters),
        prepared.plan.concurrency,
        flags.rate,
        flags.seed,
        command,
        prepared.version,
        server,
        prepared.kernels,
    )


def _write(flags: argparse.Namespace, result: LoadResult, report: dict[str, Any], output: Output) -> None:
    from lora_serve.commands.bench.plot import draw_report

    try:
        file = write_report(flags.out, report)
        draw_report(result, report, flags.out / "report.png")
    except ImportError:
        output.note(NO_PICTURE)
    except OSError as error:
        raise ConfigError(f"--out {flags.out}: {error.strerror or error}") from error
    output.note(f"written: {file}")
