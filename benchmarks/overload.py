"""Goodput and refusals from half to ten times the capacity: a real server on the demo model, an open loop of arrivals.

    python -m benchmarks.overload [--seconds 12] [--factors 0.5 1 2 5 10] [--max-queue N] [--out FILE.json]

The capacity is what a closed loop gets that keeps every row busy. By default a second server is then started whose
--max-queue is what the capacity answers in half of --first-token seconds: who waits behind more is served in vain.
Requests arrive at random (Poisson) at multiples of the capacity, whether earlier ones are answered or not. Goodput:
tokens per second of requests whose first token took less than --first-token seconds (Server-Timing's queue, load and
prefill). Refusal: from sending to the last byte of the 503. Every fifth of the refused comes again once, when
Retry-After says so. Last, callers of whom all obey Retry-After until they are answered, many times as many as may wait:
how many tries an answer took. The generator shares the machine with the server; `late_ms` is how much later than meant
it sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.overload_plot import draw
from benchmarks.report import machine
from lora_serve.commands.demo import BASE, DATA, adapter_folders
from lora_serve.commands.server_process import ServerProcess

ROWS = 16
OBEY_EVERY = 5
PROBES = ("/health", "/ready", "/metrics")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's end. Times are seconds."""

    status: int  # 0: no answer
    seconds: float
    first_token: float = 0.0  # from its arrival at the server
    num_tokens: int = 0
    retry_after: float = 0.0


@dataclass(slots=True)
class Site:
    """The server, and what is asked of it."""

    http: aiohttp.ClientSession
    bodies: Sequence[bytes]
    random: random.Random = field(default_factory=lambda: random.Random(0))

    async def ask(self) -> Answer:
        body = self.bodies[self.random.randrange(len(self.bodies))]
        start = time.perf_counter()
        try:
            async with self.http.post("/v1/completions", data=body) as response:
                data = await response.read()
                seconds = time.perf_counter() - start
                if response.status != 200:
                    return Answer(response.status, seconds, retry_after=float(response.headers.get("Retry-After", 0)))
                first = _first_token(response.headers["Server-Timing"])
        except aiohttp.ClientError:
            return Answer(0, time.perf_counter() - start)
        return Answer(200, seconds, first, json.loads(data)["usage"]["completion_tokens"])

    async def probe(self, found: list[float]) -> None:
        """Until it is cancelled, what a monitor would wait for."""
        while True:
            for path in PROBES:
                start = time.perf_counter()
                async with self.http.get(path) as response:
                    await response.read()
                found.append(time.perf_counter() - start)
            await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 1, 2, 5, 10])
    parser.add_argument("--max-queue", type=int)
    parser.add_argument("--first-token", type=float, default=2.0)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overload.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with _server(Path(folder), ROWS) as server:
            capacity = asyncio.run(_capacity(server.url, options))
        print(f"capacity {capacity:.1f} requests per second", flush=True)
        options.max_queue = options.max_queue or max(1, round(capacity * options.first_token / 2))
        with _server(Path(folder), options.max_queue) as server:
            found = asyncio.run(_measure(server.url, capacity, options))
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    report = {"machine": machine(), "settings": {**settings, "max_num_seqs": ROWS}, **found}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    with suppress(ModuleNotFoundError):  # matplotlib is no dependency: the figures are in the JSON
        draw(report, options.out.with_suffix(".png"))


@contextmanager
def _server(folder: Path, max_queue: int) -> Iterator[ServerProcess]:
    arguments = ["--model", str(DATA / "model"), "--served-model-name", BASE, "--store", f"{folder}/store"]
    arguments += ["--max-num-seqs", str(ROWS), "--max-queue", str(max_queue)]
    for name, path in adapter_folders().items():
        arguments += ["--lora-modules", f"{name}={path}"]
    with ServerProcess(arguments, folder / "log") as server:
        server.wait_until_ready(300)
        yield server


@asynccontextmanager
async def _site(url: str, output_tokens: int) -> AsyncIterator[Site]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    headers = {"Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, connector=connector, headers=headers, timeout=timeout) as http:
        yield Site(http, _bodies(output_tokens))


async def _capacity(url: str, options: argparse.Namespace) -> float:
    """Requests per second."""
    async with _site(url, options.output_tokens) as site:
        await _closed_loop(site, options.seconds / 4)
        return await _closed_loop(site, options.seconds)


async def _measure(url: str, capacity: float, options: argparse.Namespace) -> dict[str, Any]:
    async with _site(url, options.output_tokens) as site:
        await _closed_loop(site, options.seconds / 4)
        rows = []
        for factor in options.factors:
            rows.append({"factor": factor, **await _open_loop(site, factor * capacity, options)})
            print("  ".join(f"{name} {value:.1f}" for name, value in rows[-1].items()), flush=True)
        obedient = await _obedient(site, 10 * options.max_queue, options.seconds)
        print("obedient:", "  ".join(f"{name} {value:.1f}" for name, value in obedient.items()))
    peak = max(row["goodput"] for row in rows)
    return {
        "capacity": capacity,
        "goodput_of_peak": {str(row["factor"]): row["goodput"] / peak for row in rows},
        "rows": rows,
        "obedient": obedient,
    }


def _bodies(output_tokens: int) -> list[bytes]:
    """Requests for the base and for every tenant's adapter, with prompts that begin differently."""
    generator = random.Random(0)
    fields = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    models = [BASE, *adapter_folders()]
    prompts = [[generator.randrange(100, 400) for _ in range(24)] for _ in range(64)]
    return [
        json.dumps({"model": models[number % len(models)], "prompt": prompt, **fields}).encode()
        for number, prompt in enumerate(prompts)
    ]


async def _closed_loop(site: Site, seconds: float) -> float:
    """Answers per second with somebody always waiting."""
    answers: list[Answer] = []
    start = time.perf_counter()

    async def user() -> None:
        while time.perf_counter() < start + seconds:
            answers.append(await site.ask())

    await asyncio.gather(*(user() for _ in range(ROWS + ROWS // 2)))
    return sum(answer.status == 200 for answer in answers) / (time.perf_counter() - start)


async def _open_loop(site: Site, per_second: float, options: argparse.Namespace) -> dict[str, float]:
    answers: list[Answer] = []
    again: list[Answer] = []
    probes: list[float] = []
    late: list[float] = []

    async def caller(number: int) -> None:
        answer = await site.ask()
        answers.append(answer)
        if answer.status == 503 and number % OBEY_EVERY == 0:
            await asyncio.sleep(answer.retry_after)
            again.append(await site.ask())

    monitor = asyncio.create_task(site.probe(probes))
    calls: list[asyncio.Task[None]] = []
    start = time.perf_counter()
    arrival = start
    while (arrival := arrival + site.random.expovariate(per_second)) < start + options.seconds:
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        late.append(time.perf_counter() - arrival)
        calls.append(asyncio.create_task(caller(len(calls))))
    await asyncio.gather(*calls)
    seconds = time.perf_counter() - start
    monitor.cancel()
    with suppress(asyncio.CancelledError):
        await monitor
    return _row(answers, again, seconds, options.first_token) | {
        "late_ms_p99": 1000 * _percentile(late, 99),
        "probe_ms_p50": 1000 * _percentile(probes, 50),
        "probe_ms_p99": 1000 * _percentile(probes, 99),
    }


def _row(answers: list[Answer], again: list[Answer], seconds: float, limit: float) -> dict[str, float]:
    """`seconds` lasts until the last answer, so tokens that come after the arrivals' end are not given away."""
    refused = [answer.seconds for answer in answers if answer.status == 503]
    good = [answer for answer in (*answers, *again) if answer.status == 200 and answer.first_token < limit]
    first = [answer.first_token for answer in answers if answer.status == 200]
    return {
        "sent": len(answers),
        "answered": len(first),
        "refused": len(refused),
        "failed": len(answers) - len(first) - len(refused),
        "seconds": seconds,
        "goodput": sum(answer.num_tokens for answer in good) / seconds,
        "first_token_ms_p50": 1000 * _percentile(first, 50),
        "first_token_ms_p99": 1000 * _percentile(first, 99),
        "refusal_ms_p50": 1000 * _percentile(refused, 50),
        "refusal_ms_p99": 1000 * _percentile(refused, 99),
        "refusal_ms_max": 1000 * max(refused, default=0.0),
        "retry_after_p50": _percentile([answer.retry_after for answer in answers if answer.status == 503], 50),
        "came_again": len(again),
        "came_again_and_got_in": sum(answer.status == 200 for answer in again),
    }


async def _obedient(site: Site, num_callers: int, seconds: float) -> dict[str, float]:
    """So many callers at once; each comes again when it is told to, until it is answered."""
    tries: list[int] = []
    num_tokens = 0

    async def caller() -> None:
        nonlocal num_tokens
        num_tries, answer = 1, await site.ask()
        while answer.status == 503:
            await asyncio.sleep(answer.retry_after)
            num_tries, answer = num_tries + 1, await site.ask()
        tries.append(num_tries)
        num_tokens += answer.num_tokens

    start = time.perf_counter()
    calls = [asyncio.create_task(caller()) for _ in range(num_callers)]
    done, late = await asyncio.wait(calls, timeout=3 * seconds)
    elapsed = time.perf_counter() - start
    for call in late:
        call.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return {
        "callers": num_callers,
        "answered": len(done),
        "seconds": elapsed,
        "tokens_per_s": num_tokens / elapsed,
        "tries_mean": statistics.fmean(tries) if tries else 0.0,
        "tries_max": max(tries, default=0),
    }


def _first_token(timing: str) -> float:
    parts = dict(part.split(";dur=") for part in timing.split(", "))
    return sum(float(parts[name]) for name in ("queue", "load", "prefill")) / 1000


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    main()
