"""What the server withstands, in figures: checked answers under eviction races, storms of disconnects, overload, soak.

    python -m benchmarks.reliability [--answers 20000] [--disconnects 5000] [--soak-minutes 10] [--out FILE] [--no-docs]

Every answer is compared with transformers (one adapter merged at a time) and PEFT. Each part runs a server of its own
on a tiny random model: the races with 1, 2 and 4 slots for 64 adapters (the engine in the server and in a process of
its own) while ids are registered and deleted; the storm of clients that hang up at any moment; ten times the requests
that may wait; and a soak of races and disconnects during which memory, descriptors and threads are read every few
seconds: their slope is that of a least-squares line through the second half. Exit code 1 if one answer was wrong,
something stayed behind, or memory grew. The figures go into FILE and, between two marks, into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import machine
from lora_serve.server_process import ServerProcess
from tests.canary.asking import Canaries, Verdict
from tests.canary.questions import BASE, World, make_world
from tests.canary.races import Field, Outcome, make_field, race

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
KEY = "admin-key-of-the-tests"
ADMIN = {"Authorization": f"Bearer {KEY}"}
RACES = (("thread", 1), ("thread", 2), ("thread", 4), ("process", 2))  # --engine, --max-loras
NUM_ADAPTERS = 64
SAMPLE_SECONDS = 5.0
MAX_SLOPE = 1.0  # MiB of memory per minute; a leak of 1 KiB per request is several times that


@dataclass(frozen=True)
class Site:
    """Files that all parts share."""

    world: World
    runners: Field
    root: Path

    @contextmanager
    def server(self, name: str, *flags: str, modules: bool = False) -> Iterator[ServerProcess]:
        arguments = [
            "--model", str(self.world.model), "--served-model-name", BASE, "--admin-key", KEY,
            "--store", str(self.root / name), "--adapter-root", str(self.root), "--max-model-len", "96",
            "--kv-cache-memory", "4MiB", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--warmup", "off",
            *flags,
        ]  # fmt: skip
        if modules:
            arguments += ["--lora-modules", *self.world.modules()]
        with ServerProcess(arguments, self.root / f"{name}.log") as process:
            process.wait_until_ready(300)
            yield process


def make_site(root: Path) -> Site:
    world = make_world(root / "world")
    return Site(world, make_field(world.model, world.adapters["acme/a"], root / "racers", NUM_ADAPTERS), root)


def races(site: Site, num_answers: int) -> list[dict[str, Any]]:
    """The answers are shared out evenly."""
    results = []
    for engine, slots in RACES:
        flags = ("--engine", engine, "--max-loras", str(slots), "--max-cpu-loras", "6")
        with site.server(f"race-{engine}-{slots}", *flags) as process:
            outcome = asyncio.run(race(process.url, ADMIN, site.runners, -(-num_answers // len(RACES)), seed=slots))
            evictions = asyncio.run(_get(process, "/admin/engine"))["tiers"]["device"]["evictions"]
        results.append({"engine": engine, "slots": slots, **_figures(outcome), "evictions": evictions})
        print(f"race: {results[-1]}", flush=True)
    return results


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "answers": outcome.num_answers,
        "wrong": len(outcome.wrong),
        "first_wrong": outcome.wrong[:5],
        "registrations": outcome.num_registrations,
        "deletions": outcome.num_deletions,
        "asked_while_gone": outcome.num_gone,
        "seconds": round(outcome.seconds, 1),
    }


async def _get(process: ServerProcess, path: str) -> Any:
    async with aiohttp.ClientSession(process.url, headers=ADMIN) as session, session.get(path) as response:
        return await response.json()


def disconnects(site: Site, num_clients: int) -> dict[str, Any]:
    """Clients that hang up at any moment, while canaries ask."""
    with site.server("storm", "--max-loras", "4", modules=True) as process:
        before = _usage(process)
        verdict, seconds = asyncio.run(_storm(site.world, process, num_clients))
        asyncio.run(_quiet(process))
        after = _usage(process)
    return {
        "clients": num_clients,
        "seconds": round(seconds, 1),
        "canary_answers": verdict.num_right,
        "canary_faults": verdict.faults[:5],
        "descriptors": [before["descriptors"], after["descriptors"]],
        "threads": [before["threads"], after["threads"]],
    }


async def _storm(world: World, process: ServerProcess, num_clients: int) -> tuple[Verdict, float]:
    verdict, is_over, canaries = Verdict(), asyncio.Event(), Canaries(world.questions)

    async def sing() -> None:
        while not is_over.is_set():
            await canaries.round(process.url, verdict)

    singing, started = asyncio.create_task(sing()), time.monotonic()
    left = iter(range(num_clients))
    await asyncio.gather(*(_hang_up_again_and_again(process, left, seed) for seed in range(16)))
    seconds = time.monotonic() - started
    is_over.set()
    await singing
    await canaries.round(process.url, verdict)
    return verdict, seconds


async def _hang_up_again_and_again(process: ServerProcess, left: Iterator[int], seed: int) -> None:
    generator = random.Random(seed)
    for _ in left:
        await hang_up(process.port, generator)


async def hang_up(port: int, generator: random.Random) -> None:
    """One request, left at a moment by chance: in its head, its body, its queue, its first or later tokens."""
    tenant = generator.choice(("acme", "globex", "hooli", "initech"))
    fields = {"model": f"{tenant}/{generator.choice('ab')}", "prompt": "x", "max_tokens": 60, "ignore_eos": True}
    body = json.dumps({**fields, "stream": generator.random() < 0.7, "n": generator.choice((1, 1, 3))}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = head.encode() + b"\r\n\r\n" + body
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request[: generator.choice((len(request), len(request), len(request), 50, len(request) - 3))])
        with suppress(TimeoutError):
            async with asyncio.timeout(generator.random() * 0.05):
                await reader.read(generator.choice((1, 300, 5000)))
        writer.transport.abort()


async def _quiet(process: ServerProcess) -> None:
    """Return once nothing runs any more."""
    async with asyncio.timeout(60):
        while (stats := await _get(process, "/admin/engine"))["num_running"] or stats["num_waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)  # connections are closed a moment after their rows


def overload(site: Site, num_requests: int = 1000) -> dict[str, Any]:
    """Ten times and more of what may wait, all at once."""
    with site.server("overload", "--max-loras", "4", "--max-queue", "64", modules=True) as process:
        statuses = asyncio.run(_flood(process, num_requests))
        verdict = Verdict()
        asyncio.run(Canaries(site.world.questions).round(process.url, verdict))
    counts = {str(status): statuses.count(status) for status in sorted(set(statuses))}
    return {"requests": num_requests, "statuses": counts, "canary_faults": verdict.faults[:5]}


async def _flood(process: ServerProcess, num_requests: int) -> list[int]:
    async with aiohttp.ClientSession(process.url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> int:
            body = {"model": ("acme/a", "globex/b", BASE)[number % 3], "prompt": "flood", "max_tokens": 16}
            async with session.post("/v1/completions", json=body) as response:
                await response.read()
                return response.status

        return await asyncio.gather(*(one(number) for number in range(num_requests)))


def soak(site: Site, minutes: float) -> dict[str, Any]:
    """Races and hang-ups together, while the process is watched."""
    with site.server("soak", "--max-loras", "4", "--max-cpu-loras", "6", modules=True) as process:
        samples, outcome = asyncio.run(_soak(site, process, minutes * 60))
    half = samples[len(samples) // 2 :]
    return {
        "minutes": minutes,
        **_figures(outcome),
        "memory_mib": [round(samples[0]["memory"], 1), round(samples[-1]["memory"], 1)],
        "memory_slope_mib_per_minute": round(slope([(s["at"] / 60, s["memory"]) for s in half]), 3),
        "descriptors": [min(s["descriptors"] for s in half), max(s["descriptors"] for s in half)],
        "descriptor_slope_per_minute": round(slope([(s["at"] / 60, s["descriptors"]) for s in half]), 3),
        "threads": [min(s["threads"] for s in half), max(s["threads"] for s in half)],
        "samples": samples,
    }


async def _soak(site: Site, process: ServerProcess, seconds: float) -> tuple[list[dict[str, float]], Outcome]:
    samples: list[dict[str, float]] = []
    total, started = Outcome(), time.monotonic()

    async def watch() -> None:
        while True:
            samples.append({"at": time.monotonic() - started, **_usage(process)})
            await asyncio.sleep(SAMPLE_SECONDS)

    async def leave() -> None:
        generator = random.Random(11)
        while True:
            await hang_up(process.port, generator)
            await asyncio.sleep(0.02)

    beside = [asyncio.create_task(watch()), asyncio.create_task(leave())]
    seed = 100
    while time.monotonic() - started < seconds:
        _add(total, await race(process.url, ADMIN, site.runners, 1000, seed=seed))
        seed += 1
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    return samples, total


def _add(total: Outcome, part: Outcome) -> None:
    total.num_answers += part.num_answers
    total.num_gone += part.num_gone
    total.num_registrations += part.num_registrations
    total.num_deletions += part.num_deletions
    total.seconds += part.seconds
    total.wrong += part.wrong


def _usage(process: ServerProcess) -> dict[str, float]:
    """Resident memory in MiB, open descriptors, threads."""
    folder = Path("/proc") / str(process.pid)
    lines = (folder / "status").read_text().splitlines()
    memory = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return {
        "memory": memory / 1024,
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
    }


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y); 0 of fewer than two."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def failures(report: dict[str, Any]) -> list[str]:
    """What must not be; empty: the server withstood it all."""
    found = [f"wrong answers: {part}" for part in report["races"] if part["wrong"]]
    storm, flood, long = report["disconnects"], report["overload"], report["soak"]
    if storm["canary_faults"] or storm["descriptors"][1] > storm["descriptors"][0] + 8:
        found.append(f"disconnects: {storm}")
    if flood["canary_faults"] or set(flood["statuses"]) - {"200", "429", "503"}:
        found.append(f"overload: {flood}")
    if long["wrong"] or long["memory_slope_mib_per_minute"] > MAX_SLOPE or long["descriptor_slope_per_minute"] > 1:
        found.append(f"soak: { {name: value for name, value in long.items() if name != 'samples'} }")
    return found


def table(report: dict[str, Any]) -> str:
    """The figures as Markdown."""
    storm, flood, long = report["disconnects"], report["overload"], report["soak"]
    rows = [
        _row(
            f"{part['answers']} answers (`--engine {part['engine']}`), {NUM_ADAPTERS} adapters on {part['slots']} "
            f"slots, {part['registrations']} registrations and {part['deletions']} deletions meanwhile",
            f"{part['wrong']} wrong, {part['evictions']} evictions, {part['seconds']:.0f} s",
        )
        for part in report["races"]
    ]
    before, after = storm["descriptors"]
    rows.append(
        _row(
            f"{storm['clients']} clients that hang up, in {storm['seconds']:.0f} s",
            f"{storm['canary_answers']} canary answers, {len(storm['canary_faults'])} wrong; descriptors "
            f"{before:.0f} before, {after:.0f} after",
        )
    )
    statuses = ", ".join(f"{count} x {status}" for status, count in flood["statuses"].items())
    rows.append(_row(f"{flood['requests']} requests at once where 64 may wait", statuses))
    (first, last), (fewest, most) = long["memory_mib"], long["threads"]
    rows.append(
        _row(
            f"soak of {long['minutes']:g} minutes: races and hang-ups",
            f"{long['answers']} answers, {long['wrong']} wrong; memory {first:.0f} to {last:.0f} MiB, slope "
            f"{long['memory_slope_mib_per_minute']:+.2f} MiB/min; threads {fewest:.0f} to {most:.0f}",
        )
    )
    return "\n".join(["| what | came of it |", "|---|---|", *rows])


def _row(what: str, came: str) -> str:
    return f"| {what} | {came} |"


def write_page(report: dict[str, Any]) -> None:
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{table(report)}\n{END}{tail}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--disconnects", type=int, default=5_000)
    parser.add_argument("--soak-minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-docs", action="store_true", help="leave docs/reliability.md as it is")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lora_serve-reliability-") as folder:
        site = make_site(Path(folder))
        report = {
            "machine": machine(),
            "races": races(site, options.answers),
            "disconnects": disconnects(site, options.disconnects),
            "overload": overload(site),
            "soak": soak(site, options.soak_minutes),
        }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if not options.no_docs:
        write_page(report)
    print(table(report))
    found = failures(report)
    for line in found:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
