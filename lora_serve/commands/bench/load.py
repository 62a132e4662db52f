"""The load generator: closed loop and open loop against any server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import aiohttp

from lora_serve.commands.bench.report import LoadResult, RequestRecord
from lora_serve.commands.bench.sending import Clock, open_session, send
from lora_serve.commands.bench.workload import Plan, PlannedRequest, Target

OnDone = Callable[[RequestRecord], None]


async def run_load(target: Target, plan: Plan, on_done: OnDone | None = None) -> LoadResult:
    """Sends the warm-up, then the plan; `on_done` is called as each request of the plan ends.

    Failed requests are records with an `error`; nothing is sent again. Raises ValueError for a request that
    this target cannot take (token ids to chat).
    """
    async with open_session() as http:
        warmup = Plan(plan.warmup, plan.concurrency or 16)
        try:
            await _Run(http, target, warmup).all()
            run = _Run(http, target, plan, on_done)
            await run.all()
        except* ValueError as group:
            raise group.exceptions[0] from None
    seconds = max((record.ended for record in run.records), default=0.0)
    return LoadResult(run.began, seconds, tuple(sorted(run.records, key=lambda record: record.index)))


@dataclass(slots=True)
class _Run:
    http: aiohttp.ClientSession
    target: Target
    plan: Plan
    on_done: OnDone | None = None
    began: float = field(default_factory=time.time)
    clock: Clock = field(default_factory=Clock)
    records: list[RequestRecord] = field(default_factory=list)

    async def all(self) -> None:
        requests = iter(self.plan.requests)
        first = next(requests, None)
        if first is None:
            return
        whole = itertools.chain((first,), requests)
        await (self.closed_loop(whole) if first.at is None else self.open_loop(whole))

    async def closed_loop(self, requests: Iterable[PlannedRequest]) -> None:
        queue = enumerate(requests)
        async with asyncio.TaskGroup() as users:
            for _ in range(self.plan.concurrency or 1):
                users.create_task(self._user(queue))

    async def open_loop(self, requests: Iterable[PlannedRequest]) -> None:
        places = nullcontext() if self.plan.concurrency is None else asyncio.Semaphore(self.plan.concurrency)
        async with asyncio.TaskGroup() as sent:
            for index, request in enumerate(requests):
                at = request.at or 0.0
                if self.plan.duration is not None and at >= self.plan.duration:
                    break
                await asyncio.sleep(at - self.clock.now())
                sent.create_task(self._in_place(places, request, index))

    async def _user(self, queue: Iterator[tuple[int, PlannedRequest]]) -> None:
        for index, request in queue:
            await self._one(request, index)
            if self.plan.duration is not None and self.clock.now() >= self.plan.duration:
                return

    async def _in_place(
        self, places: asyncio.Semaphore | nullcontext[None], request: PlannedRequest, index: int
    ) -> None:
        async with places:
            await self._one(request, index)

    async def _one(self, request: PlannedRequest, index: int) -> None:
        record = await send(self.http, self._target_now(), request, index, self.clock)
        if record.error == "timeout" and self._is_over():
            record = replace(record, error="cut_off", detail="not answered when the run was over")
        self.records.append(record)
        if self.on_done is not None:
            self.on_done(record)

    def _target_now(self) -> Target:
        """The target with a timeout of no more than the run has left."""
        if self.plan.cut_off is None:
            return self.target
        left = max(0.0, self.plan.cut_off - self.clock.now())
        return replace(self.target, timeout=min(self.target.timeout, left))

    def _is_over(self) -> bool:
        return self.plan.cut_off is not None and self.clock.now() >= self.plan.cut_off
