"""A flood of three times a server's capacity, with a second server as its neighbour (--overflow).

    python -m benchmarks.overflow [--seconds 15] [--factor 3] [--rows 2] [--neighbour-rows 32] [--out FILE.json]

Two servers on the demo model, a thread each; the first runs --rows rows at once, its neighbour --neighbour-rows. The
capacity is what a closed loop of --rows callers gets of the first alone. Then, each from random arrivals (Poisson) of
streamed completions on all adapters: quiet (0.3 of the capacity), the flood without a neighbour, the flood with one,
and a flood of streams and whole answers in whose middle the neighbour is killed. The first token counts from the
planned time. Whole answers must all come, and of the streams at most those end with an error that the neighbour had
begun. The generator shares the machine with both servers; `late_ms` is how much later than meant it sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.open_loop import poisson_times
from benchmarks.report import machine, percentiles, result_file
from lora_serve.commands.demo import BASE, DATA, adapter_folders
from lora_serve.commands.server_process import ServerProcess, free_port

QUIET = 0.3  # of the capacity
PATIENCE = 120.0  # seconds for an answer


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of one request. Times are seconds."""

    end: str  # "whole", "refused", "lost", or "retry": a stream that said so
    has_left: bool = False
    first_token: float = 0.0  # from the planned time
    late: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--neighbour-rows", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--after-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=result_file("overflow"))
    options = parser.parse_args()
    made = "python -m benchmarks.overflow " + shlex.join(sys.argv[1:])
    report = {"machine": machine(), "command": made, "settings": {k: v for k, v in vars(options).items() if k != "out"}}
    with tempfile.TemporaryDirectory() as folder:
        report |= asyncio.run(_measured(Path(folder), options))
    print(json.dumps(report, indent=1))
    options.out.write_text(json.dumps(report, indent=1) + "\n")


@contextmanager
def _server(folder: Path, rows: int, *more: str, port: int = 0) -> Iterator[ServerProcess]:
    folder.mkdir(exist_ok=True)
    arguments = ["--model", str(DATA / "model"), "--served-model-name", BASE, "--store", str(folder / "store")]
    arguments += ["--max-num-seqs", str(rows), "--max-queue", "100000", "--max-loras", "16", *more]
    for name, path in adapter_folders().items():
        arguments += ["--lora-modules", f"{name}={path}"]
    with ServerProcess(arguments, folder / "log", port) as server:
        server.wait_until_ready(300)
        yield server


async def _measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    port, found = free_port(), dict[str, Any]()
    overflow = ["--overflow", f"near=http://127.0.0.1:{port}", "--overflow-after-ms", str(options.after_ms)]
    with _server(folder / "alone", options.rows) as alone:
        await _capacity(alone.url, options)  # warm: every adapter is loaded
        capacity = await _capacity(alone.url, options)
        found["capacity"] = round(capacity, 1)
        found["quiet"] = _figures(await _flood(alone.url, QUIET * capacity, options))
        found["flood_alone"] = _figures(await _flood(alone.url, options.factor * capacity, options))
    with (
        _server(folder / "neighbour", options.neighbour_rows, port=port) as neighbour,
        _server(folder / "first", options.rows, *overflow) as first,
    ):
        for server in (neighbour, first):
            await _capacity(server.url, options)
        found["quiet_with_neighbour"] = _figures(await _flood(first.url, QUIET * capacity, options))
        found["flood"] = _figures(await _flood(first.url, options.factor * capacity, options))
        flood = _flood(first.url, options.factor * capacity, options, whole=0.5)
        _, answers = await asyncio.gather(_kill(neighbour, options.seconds / 2), flood)
        found["neighbour_killed"] = _figures(answers)
    quiet, flood_p95 = found["quiet"]["first_token_p95_ms"], found["flood"]["first_token_p95_ms"]
    return {**found, "flood_over_quiet_p95": round(flood_p95 / quiet, 2)}


async def _kill(neighbour: ServerProcess, seconds: float) -> None:
    await asyncio.sleep(seconds)
    os.killpg(neighbour.pid, signal.SIGKILL)


async def _capacity(url: str, options: argparse.Namespace) -> float:
    """Requests per second of a closed loop."""
    until, counts = time.perf_counter() + options.seconds, Counter[str]()

    async def caller(http: aiohttp.ClientSession, seed: int) -> None:
        chance = random.Random(seed)
        while time.perf_counter() < until:
            counts[(await _ask(http, _body(chance, options), time.perf_counter())).end] += 1

    async with aiohttp.ClientSession(url) as http:
        await asyncio.gather(*(caller(http, seed) for seed in range(options.rows)))
    assert set(counts) == {"whole"}, counts
    return counts["whole"] / options.seconds


async def _flood(url: str, rate: float, options: argparse.Namespace, whole: float = 0.0) -> list[Answer]:
    """`whole`: the share of answers that are not streamed."""
    chance = random.Random(0)
    times = poisson_times(lambda now: rate, options.seconds, 1)
    start = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def send(at: float, body: dict[str, Any]) -> Answer:
            await asyncio.sleep(start + at - time.perf_counter())
            return await _ask(http, body, start + at)

        bodies = [_body(chance, options, is_whole=chance.random() < whole) for _ in times]
        return await asyncio.gather(*map(send, times, bodies))


def _body(chance: random.Random, options: argparse.Namespace, *, is_whole: bool = False) -> dict[str, Any]:
    name = chance.choice([BASE, *adapter_folders()])
    prompt = " ".join(chance.choice(["the", "order", "late", "ship", "why"]) for _ in range(8))
    body = {"model": name, "prompt": prompt, "max_tokens": options.output_tokens, "temperature": 0}
    return body | {"ignore_eos": True, "stream": not is_whole}


async def _ask(http: aiohttp.ClientSession, body: dict[str, Any], planned: float) -> Answer:
    sent = time.perf_counter()
    try:
        async with http.post("/v1/completions", json=body) as response:
            if response.status != 200:
                return Answer("refused" if response.status in (429, 503) else "lost")
            has_left, late = "X-Served-By" in response.headers, sent - planned
            await response.content.readany()
            first = time.perf_counter() - planned
            rest = await response.read()
            is_broken = b"neighbour_lost" in rest
            return Answer("retry" if is_broken else "whole", has_left, first if body["stream"] else 0.0, late)
    except (aiohttp.ClientError, TimeoutError):
        return Answer("lost")


def _figures(answers: Sequence[Answer]) -> dict[str, Any]:
    ends = Counter(answer.end for answer in answers)
    streams = sorted(answer.first_token for answer in answers if answer.first_token)
    return {
        "requests": len(answers),
        **{end: ends[end] for end in ("whole", "refused", "lost", "retry")},
        "overflowed": sum(answer.has_left for answer in answers),
        "first_token_p95_ms": round(1000 * streams[int(0.95 * (len(streams) - 1))], 1) if streams else None,
        "first_token_ms": percentiles(streams),
        "late_ms": percentiles([answer.late for answer in answers]),
    }


if __name__ == "__main__":
    main()
