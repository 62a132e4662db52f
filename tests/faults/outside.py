"""Servers as processes, wherever their engines are, and what is done to them from outside."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.fleet.engines import OF_RAY, command_of
from lora_serve.commands.server_process import ServerProcess
from tests.canary.asking import Canaries, Verdict
from tests.canary.house import KEY
from tests.canary.questions import BASE, World
from tests.canary.watch import Watch
from tests.e2e.processes import engine_of
from tests.engine_choice import EngineHost

ANSWER_SECONDS = 2.0  # for a probe


def arguments(world: World, store: Path, is_first: bool) -> list[str]:
    modules = ["--lora-modules", *world.modules()] if is_first else []
    return [
        "--model", str(world.model), "--served-model-name", BASE, "--admin-key", KEY, "--store", str(store),
        "--adapter-root", str(world.root), "--max-model-len", "96", "--kv-cache-memory", "4MiB", "--warmup", "off",
        "--engine-max-restarts", "50", *modules,
    ]  # fmt: skip


def ask_all(process: ServerProcess, canaries: Canaries) -> None:
    verdict = Verdict()
    asyncio.run(canaries.round(process.url, verdict))
    assert (verdict.faults, verdict.num_right) == ([], 12)


@contextmanager
def asking(process: ServerProcess, canaries: Canaries, *, may_refuse: bool) -> Iterator[Watch]:
    """Canaries all the while. Afterwards none was answered wrong and none is without an answer; the last round was
    answered right. `may_refuse`: they may have been told to come again.
    """
    with Watch(process.url, canaries, may_refuse, pause=0.02) as watch:
        yield watch
    assert watch.verdict.faults == []
    assert watch.verdict.num_right >= 12


def engines_of(process: ServerProcess, host: EngineHost) -> list[int]:
    """The processes in which a server's engines are."""
    if host.name == "thread":
        return [process.pid]
    if host.name == "process":
        return [engine_of(process.pid)]
    flags = process._arguments
    title = f"{OF_RAY}{flags[flags.index('--fleet-name') + 1]}:"
    every = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in every if command_of(pid).startswith(title)]


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """They stand still as long as the block lasts; those that were ended meanwhile stay so."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if command_of(pid):
                os.kill(pid, signal.SIGCONT)


def probe(process: ServerProcess, path: str) -> int | None:
    """The status; None: no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)
