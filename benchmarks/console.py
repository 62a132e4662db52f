"""The price of the live view: the engine's steps without a viewer, with one, and with twenty.

    python -m benchmarks.console [--rounds N] [--seconds S] [--engine thread|process] [--rate 1..10] [--write]

A real server on the demo model answers 16 streams over 8 adapters all the time; a process sends them, another reads the
views over HTTP. The cases take turns in one run: nobody, one viewer, twenty, and then no viewer for as long as the
engine notes what it does for one that may come again. Each figure is a ratio to the round's own "nobody"; of these
the median counts, and the one of a second "nobody" in each round says how much is noise.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.report import SERVER, machine, result_file
from lora_serve.commands.server_process import HOST, ServerProcess
from lora_serve.engine.recorder import WATCHED_SECONDS

KEY = "admin-key-of-the-bench"
CASES = {"nobody": 0, "one": 1, "twenty": 20, "nobody again": 0}
ROWS = 16
DEMO = SERVER / "demo_data"
ADAPTERS = sorted(f"{folder.parent.name}/{folder.name}" for folder in DEMO.glob("adapters/*/*"))[:8]


@dataclass(frozen=True, slots=True)
class Window:
    """Sums over some seconds of one case."""

    steps: int
    step_seconds: float
    tokens: int
    seconds: float
    processor: float  # seconds of the server's processes
    event_loop: float  # of these, seconds of the thread that serves HTTP

    @property
    def figures(self) -> dict[str, float]:
        """The figures that are compared."""
        return {
            "step_ms": 1000 * self.step_seconds / self.steps,
            "tokens_per_second": self.tokens / self.seconds,
            "processor_ms_per_step": 1000 * self.processor / self.steps,
            "event_loop_ms_per_step": 1000 * self.event_loop / self.steps,
            "engine_ms_per_step": 1000 * (self.processor - self.event_loop) / self.steps,
        }


def main() -> int:
    """Runs the cases in turn, and prints and writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case in each round")
    parser.add_argument("--engine", default="thread", choices=("thread", "process"))
    parser.add_argument("--rate", type=int, default=5, help="frames per second")
    parser.add_argument("--write", action="store_true", help="the report into benchmarks/results")
    asked = parser.parse_args()
    rounds = measured(asked.rounds, asked.seconds, asked.engine, asked.rate)
    report = {
        "command": "python -m benchmarks.console " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "rows": ROWS,
        "adapters": len(ADAPTERS),
        "rate": asked.rate,
        "engine": asked.engine,
        "ratios": ratios(rounds),
        "rounds": [{case: rounded(window.figures) for case, window in one.items()} for one in rounds],
    }
    print(json.dumps(report["ratios"], indent=1))
    if asked.write:
        words = ("console", *([] if asked.engine == "thread" else [asked.engine]))
        result_file(*words).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def ratios(rounds: Sequence[dict[str, Window]]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each case and figure the median ratio to the same round's "nobody", and the quartiles."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for case in CASES:
        found[case] = {}
        for name in rounds[0][case].figures:
            values = sorted(one[case].figures[name] / one["nobody"].figures[name] for one in rounds)
            low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
            found[case][name] = rounded({"median": middle, "from": low, "to": high})
    return found


def measured(num_rounds: int, seconds: float, engine: str, rate: int) -> list[dict[str, Window]]:
    """The windows of each round, by case."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), engine) as server, child("load", server.url):
        time.sleep(3)
        return [one_round(server, seconds, rate) for _ in range(num_rounds)]


def one_round(server: ServerProcess, seconds: float, rate: int) -> dict[str, Window]:
    found = {}
    for case, count in CASES.items():
        if case == "nobody again":
            time.sleep(WATCHED_SECONDS + 0.5)
        with child("view", server.url, str(count), str(rate)) if count else nothing():
            time.sleep(1.5 if count else 0.2)
            found[case] = window(server, seconds)
    return found


def window(server: ServerProcess, seconds: float) -> Window:
    before, start, used = engine_of(server), time.monotonic(), times_of(server.pid)
    time.sleep(seconds)
    after, end, used_after = engine_of(server), time.monotonic(), times_of(server.pid)
    steps, tokens = (after[name] - before[name] for name in ("num_steps", "num_step_tokens"))
    processor, event_loop = (later - earlier for later, earlier in zip(used_after, used, strict=True))
    return Window(steps, after["step_seconds"] - before["step_seconds"], tokens, end - start, processor, event_loop)


def engine_of(server: ServerProcess) -> dict[str, Any]:
    """GET /admin/engine."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    connection.request("GET", "/admin/engine", headers={"Authorization": f"Bearer {KEY}"})
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def times_of(pid: int) -> tuple[float, float]:
    """Seconds of processor time: of the process with its children that run, and of its main thread alone."""
    pids = [pid, *(int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    threads = [_used(task) for one in pids for task in Path(f"/proc/{one}/task").iterdir()]
    return sum(threads), _used(Path(f"/proc/{pid}/task/{pid}"))


def _used(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


@contextmanager
def serving(folder: Path, engine: str, inside: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """`inside`: what comes before the server's command."""
    modules = [f"{name}={DEMO / 'adapters' / name}" for name in ADAPTERS]
    arguments = ["--model", str(DEMO / "model"), "--served-model-name", "base", "--store", str(folder / "store")]
    arguments += ["--admin-key", KEY, "--engine", engine, "--lora-modules", *modules]
    with ServerProcess(arguments, folder / "log", inside=inside) as server:
        server.wait_until_ready(180)
        yield server


@contextmanager
def child(*words: str) -> Iterator[None]:
    """One of this file's other roles in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.console", *words])
    try:
        yield
        assert process.poll() is None, f"{words[0]} ended by itself"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def nothing() -> Iterator[None]:
    yield


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


async def load(url: str, num_rows: int = ROWS) -> None:
    """Keeps so many rows running, of the adapters in turn, for ever."""

    async def keep(http: aiohttp.ClientSession, number: int) -> None:
        body = {"model": ADAPTERS[number % len(ADAPTERS)], "prompt": f"row {number}", "max_tokens": 300}
        while True:
            async with http.post("/v1/completions", json={**body, "ignore_eos": True, "stream": True}) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content.iter_any():
                    pass

    async with aiohttp.ClientSession(url) as http:
        await asyncio.gather(*(keep(http, number) for number in range(num_rows)))


def view(url: str, count: int, rate: int) -> None:
    """Takes what `count` live views are sent, and looks at nothing of it: readers are on other machines."""
    where = urlsplit(url)
    words = (
        f"GET /admin/engine/stream?rate={rate} HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    )
    readers = selectors.DefaultSelector()
    for _ in range(count):
        reader = socket.create_connection((where.hostname, where.port or 80))
        reader.sendall(words.encode())
        head = reader.recv(2**16)
        assert head.startswith(b"HTTP/1.1 200 "), head
        readers.register(reader, selectors.EVENT_READ)
    room = bytearray(2**20)
    while True:
        for key, _ in readers.select():
            assert isinstance(key.fileobj, socket.socket)
            assert key.fileobj.recv_into(room), "the view ended"


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        asyncio.run(load(sys.argv[2], *map(int, sys.argv[3:])))
    elif sys.argv[1:2] == ["view"]:
        view(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
