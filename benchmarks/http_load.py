"""The client of `lora-serve bench` on the benchmarks' jobs: token ids in, each token timed, answers checked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from benchmarks.workload import Job, Load, Measured, Sample
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.report import RequestRecord
from lora_serve.commands.bench.sending import Clock
from lora_serve.commands.bench.sending import send as send_request
from lora_serve.commands.bench.workload import Plan, PlannedRequest, Target


def run_http(url: str, base: str, jobs: Sequence[Job], load: Load) -> Measured:
    """Send every job, at most `load.concurrency` at a time; a job that fails leaves no sample."""
    requests = [planned(job, load.output_tokens) for job in jobs]
    result = asyncio.run(run_load(Target(url, base), Plan(requests, load.concurrency)))
    samples: list[Sample] = []
    for record in result.records:
        try:
            samples.append(sample_of(record))
        except ValueError as error:
            print(f"request {record.index} failed: {error}")
    return Measured(result.seconds, tuple(samples), num_failed=len(jobs) - len(samples))


async def send(
    http: aiohttp.ClientSession, url: str, base: str, job: Job, output_tokens: int, *, check: bool = True
) -> Sample:
    """One streamed request on a session of `open_session`. Raises ValueError for what is no answer.

    With `check` its text must tell all its tokens.
    """
    record = await send_request(http, Target(url, base), planned(job, output_tokens), 0, Clock())
    return sample_of(record, check=check)


def planned(job: Job, output_tokens: int, at: float | None = None) -> PlannedRequest:
    return PlannedRequest(job.prompt, job.adapter, output_tokens, at)


def sample_of(record: RequestRecord, *, check: bool = True) -> Sample:
    """Raises ValueError for a failed request, and with `check` if the text does not tell as many ids as were asked for.

    The text's words are `t<id>` (lora_serve/random_weights/checkpoints.py).
    """
    if record.error is not None:
        raise ValueError(f"{record.error}: {record.detail}")
    if not check:
        return Sample(record.first_token, record.gaps, ())
    token_ids = tuple(int(word.removeprefix("t")) for word in record.text.split())
    if len(token_ids) != record.asked_tokens:
        raise ValueError(f"{len(token_ids)} tokens instead of {record.asked_tokens}: {record.text[-40:]!r}")
    return Sample(record.first_token, record.gaps, token_ids)
