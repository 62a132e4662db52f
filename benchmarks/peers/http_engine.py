"""A server as an engine: the load comes over HTTP, from the same client for all servers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.processes import Child
from benchmarks.workload import Job, Load, Measured, Sample
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.report import LoadResult, RequestRecord
from lora_serve.commands.bench.workload import Plan, PlannedRequest, Target


@dataclass(frozen=True, slots=True)
class HttpEngine:
    """A child that listens."""

    child: Child
    target: Target
    start_seconds: float

    @property
    def pid(self) -> int:
        return self.child.pid

    def run(self, jobs: Sequence[Job], load: Load) -> Measured:
        planned = [PlannedRequest(job.prompt, job.adapter, load.output_tokens) for job in jobs]
        result = asyncio.run(run_load(self.target, Plan(planned, load.concurrency)))
        if self.child.process.poll() is not None:
            raise self.child.failed("ended under load")
        return measured(result, load.output_tokens)

    def stop(self) -> None:
        self.child.stop()


def measured(result: LoadResult, output_tokens: int) -> Measured:
    """An answer that has not all of its tokens has failed."""
    whole = [record for record in result.answered if record.output_tokens == output_tokens]
    for record in result.records:
        if record not in whole:
            print(f"request {record.index} failed: {record.error} {record.detail} ({record.output_tokens} tokens)")
    return Measured(result.seconds, tuple(_sample(record) for record in whole), len(result.records) - len(whole))


def _sample(record: RequestRecord) -> Sample:
    return Sample(record.first_token, record.gaps, token_ids(record.text), record.index)


def token_ids(text: str) -> tuple[int, ...]:
    """The checkpoints' words are `t<id>`, so the text tells the ids, but for special tokens, which have no text."""
    return tuple(int(digits) for digits in re.findall(r"t(\d+)", text))
