"""Tenants whose requests come at their own times, whether or not the ones before were answered."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.http_load import send
from benchmarks.open_loop import poisson_times
from benchmarks.workload import Job
from lora_serve.commands.bench.sending import open_session


@dataclass(frozen=True, slots=True)
class Stream:
    """One tenant's requests: `rate` per second, at random times or in regular bursts of `burst` at once."""

    tenant: str
    model: str
    rate: float
    burst: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What each request asks for."""

    prompt_tokens: int
    output_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Answered:
    """One request. Times are seconds since the window began."""

    tenant: str
    sent: float
    tokens: tuple[float, ...]  # when each token came; () if it failed

    @property
    def first_token(self) -> float:
        """From sending it."""
        return self.tokens[0] - self.sent


def arrivals(stream: Stream, seconds: float, seed: int) -> Iterator[float]:
    """Times of one stream's requests: a Poisson process without bursts. The same seed gives the same times."""
    if stream.burst == 1:
        return iter(poisson_times(lambda at: stream.rate, seconds, f"{seed} {stream.tenant}"))
    gap = stream.burst / stream.rate
    moments = itertools.takewhile(lambda at: at < seconds, itertools.count(gap / 2, gap))
    return itertools.chain.from_iterable([moment] * stream.burst for moment in moments)


async def open_loop(url: str, streams: Sequence[Stream], work: Work, seconds: float, seed: int) -> list[Answered]:
    """Send for `seconds`, and wait for the last answer."""
    async with open_session() as http:
        start = time.perf_counter()
        jobs = [
            _send_at(http, url, stream, work, start, moment, seed + number)
            for stream in streams
            for number, moment in enumerate(arrivals(stream, seconds, seed))
        ]
        return await asyncio.gather(*jobs)


async def closed_loop(url: str, models: Sequence[str], work: Work, num_users: int, seconds: float) -> float:
    """Requests per second of so many users who each send the next request when the last one is answered."""
    async with open_session() as http:
        start = time.perf_counter()

        async def user(number: int) -> int:
            count = 0
            while time.perf_counter() - start < seconds:
                model = models[(number + count) % len(models)]
                count += bool((await _send(http, url, "", model, work, start, 1000 * number + count)).tokens)
            return count

        counts = await asyncio.gather(*(user(number) for number in range(num_users)))
        return sum(counts) / (time.perf_counter() - start)


async def _send_at(
    http: aiohttp.ClientSession, url: str, stream: Stream, work: Work, start: float, moment: float, seed: int
) -> Answered:
    await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
    return await _send(http, url, stream.tenant, stream.model, work, start, seed)


async def _send(
    http: aiohttp.ClientSession, url: str, tenant: str, model: str, work: Work, start: float, seed: int
) -> Answered:
    generator = random.Random(f"{seed} {tenant}")
    prompt = tuple(generator.randrange(3, work.vocab_size) for _ in range(work.prompt_tokens))
    sent = time.perf_counter() - start
    try:
        sample = await send(http, url, model, Job(prompt, model), work.output_tokens, check=False)
    except ValueError as error:
        print(f"a request of {tenant or model} failed: {error}")
        return Answered(tenant, sent, ())
    return Answered(tenant, sent, tuple(itertools.accumulate(sample.gaps, initial=sent + sample.first_token)))
