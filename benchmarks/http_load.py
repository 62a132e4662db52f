"""The closed loop against a server: /v1/completions over server-sent events, token ids in, each token timed."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence

import aiohttp

from benchmarks.workload import Job, Load, Measured, Sample

DONE = b"data: [DONE]"


def run_http(url: str, base: str, jobs: Sequence[Job], load: Load) -> Measured:
    """Send every job, at most `load.concurrency` at a time; a job that fails leaves no sample."""
    return asyncio.run(_run(url, base, jobs, load))


async def _run(url: str, base: str, jobs: Sequence[Job], load: Load) -> Measured:
    samples: list[Sample | None] = [None] * len(jobs)
    queue = iter(enumerate(jobs))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=3600)) as http:
        start = time.perf_counter()
        await asyncio.gather(*(_user(http, base, queue, samples, load) for _ in range(load.concurrency)))
        seconds = time.perf_counter() - start
    done = tuple(sample for sample in samples if sample is not None)
    return Measured(seconds, done, num_failed=len(jobs) - len(done))


async def _user(
    http: aiohttp.ClientSession,
    base: str,
    queue: Iterator[tuple[int, Job]],
    samples: list[Sample | None],
    load: Load,
) -> None:
    for index, job in queue:
        try:
            samples[index] = await send(http, base, job, load.output_tokens)
        except (aiohttp.ClientError, ValueError) as error:
            print(f"request {index} failed: {error}")


async def send(http: aiohttp.ClientSession, base: str, job: Job, output_tokens: int, *, check: bool = True) -> Sample:
    """One streamed request. Raises ValueError for what is no answer, and what aiohttp raises.

    With `check` its text must tell all its tokens.
    """
    body = {
        "model": job.adapter or base,
        "prompt": list(job.prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    start = time.perf_counter()
    times, lines = [], []
    async with http.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise ValueError(f"{response.status} {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                lines.append(line)
    if not check:
        return Sample(times[0] - start, _gaps(times[:output_tokens]), ())
    token_ids = _token_ids(lines)  # parsed after the last token: the load generator shares the machine's cores
    if len(token_ids) != output_tokens:
        raise ValueError(f"{len(token_ids)} tokens instead of {output_tokens}: {lines[-1:]!r}")
    return Sample(times[0] - start, _gaps(times[:output_tokens]), token_ids)


def _token_ids(lines: Sequence[bytes]) -> tuple[int, ...]:
    """The text's words are `t<id>` (benchmarks/checkpoints.py), so the text tells the ids."""
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return tuple(int(word.removeprefix("t")) for word in text.split())


def _gaps(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(later - earlier for earlier, later in itertools.pairwise(times))
