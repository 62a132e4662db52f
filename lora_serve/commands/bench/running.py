"""Runs a bench: prepares target and plan from the flags and the server's own answers, sends the load, reports."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lora_serve.commands.bench.discovery import ServerFacts, discover, find_words
from lora_serve.commands.bench.display import draw_report, progress_bar, tables
from lora_serve.commands.bench.flags import api_key, num_spawned, popularity_of
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.report import LoadResult, RunFacts, make_report, write_report
from lora_serve.commands.bench.workload import FIRST_TOKEN_ID, Arrivals, Plan, Target, Workload
from lora_serve.commands.output import ExitCode, Output
from lora_serve.commands.server_process import ServerProcess
from lora_serve.core.errors import ConfigError, how_to_install
from lora_serve.simulate.workload import TraceRow, read_trace

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
    facts, result = asyncio.run(_load(flags, url, output, command))
    if peak_rss is not None:
        server = {**server, "peak_rss_bytes": peak_rss()}
    report = make_report(result, replace(facts, server=server), flags.slo)
    if flags.out is not None:
        _write(flags, result, report, output)
    output.show(report, *tables(report))
    return ExitCode.REFUSED if report["failed"] else ExitCode.OK


async def _load(flags: argparse.Namespace, url: str, output: Output, command: str) -> tuple[RunFacts, LoadResult]:
    target, workload, found = await prepare(flags, url)
    plan = _plan(flags, workload)
    with progress_bar(output, workload.num_requests) as on_done:
        result = await run_load(target, plan, on_done)
    facts = RunFacts(
        flags.engine or found.engine or "unknown",
        target.model,
        workload.popularity,
        len(workload.adapters),
        plan.concurrency,
        flags.rate,
        flags.seed,
        command,
        found.version,
        kernels=found.kernels,
    )
    return facts, result


def _write(flags: argparse.Namespace, result: LoadResult, report: dict[str, Any], output: Output) -> None:
    try:
        file = write_report(flags.out, report)
        draw_report(result, report, flags.out / "report.png")
    except ImportError:
        output.note(NO_PICTURE)
    except OSError as error:
        raise ConfigError(f"--out {flags.out}: {error.strerror or error}") from error
    output.note(f"written: {file}")


NUM_REQUESTS = 64
CONCURRENCY = 16  # of a closed loop


async def prepare(flags: argparse.Namespace, url: str) -> tuple[Target, Workload, ServerFacts]:
    """Asks the server and makes the run's target and workload. Raises ConfigError for what neither it nor the flags
    tell.
    """
    key = api_key(flags)
    root = Target(url, "").root
    found = await discover(root, key)
    model = flags.model or found.base
    if model is None:
        raise ConfigError("--model: the server lists none, so name it")
    is_text = flags.prompt_form == "text" or flags.endpoint == "chat"
    vocab_size = flags.vocab_size or found.vocab_size
    words = await find_words(root, key, vocab_size, flags.seed) if is_text else ()
    return _target(flags, url, model, key, found), _workload(flags, found, vocab_size, words), found


def _target(flags: argparse.Namespace, url: str, model: str, key: str | None, found: ServerFacts) -> Target:
    return Target(
        url,
        model,
        flags.endpoint,
        key,
        flags.adapter_field,
        found.adapter_ids,
        flags.ignore_eos,
        flags.usage,
        flags.extra_body,
        flags.response_format,
        timeout=flags.timeout,
    )


def _workload(
    flags: argparse.Namespace, found: ServerFacts, vocab_size: int | None, words: tuple[str, ...]
) -> Workload:
    if not words and (vocab_size is None or vocab_size <= FIRST_TOKEN_ID):
        raise ConfigError("--vocab-size: the server does not say it, and token ids must be below it")
    trace = tuple(read_trace(flags.trace)) if flags.trace is not None else ()
    return Workload(
        num_requests=_num_requests(flags, trace),
        vocab_size=vocab_size or 0,
        prompt_lengths=flags.prompt_tokens,
        output_lengths=flags.output_tokens,
        popularity=popularity_of(flags),
        adapters=_adapters(flags, found),
        zipf=flags.zipf,
        arrivals=None if flags.rate is None else Arrivals(flags.rate, flags.burstiness or 1.0),
        trace=trace,
        speed=flags.speed,
        words=words,
        max_model_len=found.max_model_len,
        seed=flags.seed,
    )


def _num_requests(flags: argparse.Namespace, trace: tuple[TraceRow, ...]) -> int | None:
    if flags.num_requests is not None:
        return int(flags.num_requests)
    return None if flags.duration is not None else len(trace) or NUM_REQUESTS


def _adapters(flags: argparse.Namespace, found: ServerFacts) -> tuple[str, ...]:
    wanted: int | tuple[str, ...] | None = flags.adapters
    if isinstance(wanted, tuple):
        return wanted
    if isinstance(wanted, int) and flags.adapter_name_pattern is not None:
        return _named(flags.adapter_name_pattern, wanted)
    if wanted is not None and len(found.adapters) < wanted:
        raise ConfigError(f"--adapters {wanted}: the server lists {len(found.adapters)}")
    if popularity_of(flags) != "base" and not found.adapters:
        raise ConfigError(f"--popularity {popularity_of(flags)}: the server lists no adapter; name some by --adapters")
    return found.adapters[:wanted] if wanted or popularity_of(flags) != "base" else ()


def _named(pattern: str, num_names: int) -> tuple[str, ...]:
    try:
        names = tuple(pattern.format(index) for index in range(num_names))
    except (IndexError, KeyError, ValueError) as error:
        raise ConfigError(
            f"--adapter-name-pattern {pattern!r}: expected one place for a number, as a{{:04d}}"
        ) from error
    if len(set(names)) < num_names:
        raise ConfigError(f"--adapter-name-pattern {pattern!r}: has no place for a number, as a{{:04d}}")
    return names


def _plan(flags: argparse.Namespace, workload: Workload) -> Plan:
    is_open = workload.arrivals is not None or any(row.time is not None for row in workload.trace)
    concurrency = flags.concurrency or (None if is_open else CONCURRENCY)
    return Plan(workload, concurrency, flags.duration, warmup=workload.warmup(flags.warmup_requests))


BASE = "bench-base"
READY_SECONDS = 900.0
MAX_SLOTS = 64  # adapters on the device at once, unless --server-flags say otherwise


@dataclass(frozen=True, slots=True)
class SpawnConfig:
    """The spawned server: `num_adapters` with `ranks` in turn are registered before it is ready."""

    shape: str
    num_adapters: int
    ranks: tuple[int, ...]
    cache: Path
    server_flags: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Spawned:
    process: ServerProcess
    adapters: tuple[str, ...]
    start_seconds: float  # to /ready

    def peak_rss(self) -> int | None:
        """The largest resident memory so far, in bytes; None where /proc does not tell."""
        status = Path(f"/proc/{self.process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lora_serve" / "bench"


@contextmanager
def spawned(config: SpawnConfig) -> Iterator[Spawned]:
    """A server for as long as the block lasts, on checkpoints that are made if missing. Raises ServerFailedError."""
    from lora_serve.random_weights.checkpoints import make_adapters, make_model

    model = make_model(config.cache, config.shape, config.seed)
    adapters = make_adapters(config.cache, config.shape, config.num_adapters, config.seed, config.ranks)
    with tempfile.TemporaryDirectory(prefix="lora_serve_bench_") as folder:
        arguments = _arguments(config, model, adapters, Path(folder) / "store")
        started = time.perf_counter()
        with ServerProcess(arguments, Path(folder) / "server.log") as process:
            process.wait_until_ready(READY_SECONDS)
            yield Spawned(process, tuple(adapters), time.perf_counter() - started)


def _arguments(config: SpawnConfig, model: Path, adapters: dict[str, Path], store: Path) -> Sequence[str]:
    slots = max(1, min(config.num_adapters, MAX_SLOTS))
    arguments = ["--model", str(model), "--served-model-name", BASE, "--store", str(store), "--max-loras", str(slots)]
    if adapters:
        arguments += ["--lora-modules", *(f"{name}={folder}" for name, folder in adapters.items())]
    return [*arguments, *config.server_flags]
