"""Users in a closed loop at one gateway or several, and something that is done beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.fleet.known_answers import Asked, KnownAnswers
from benchmarks.fleet.site import BASE
from benchmarks.fleet.verdict import Event, Judged
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.report import RequestRecord
from lora_serve.commands.bench.workload import Plan, Target

TIMEOUT = 120.0  # seconds for one answer


@dataclass
class Stage:
    """What whoever breaks things is told, and tells."""

    seconds: float
    began: float = field(default_factory=time.time)
    events: list[Event] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)  # of those that have ended
    unfinished: list[str] = field(default_factory=list)  # what was not done when the load ended
    gone: set[int] = field(default_factory=set)  # gateways that were killed: their users ask nothing more

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.time() - self.began

    @property
    def left(self) -> float:
        return self.seconds - self.now

    def note(self, what: str, since: float | None = None, **facts: int | None) -> Event:
        """An event that happens now, or lasted from `since` until now."""
        at = self.now if since is None else since
        event = Event(at, what, 0.0 if since is None else self.now, **facts)
        self.events.append(event)
        return event


async def under_load(
    urls: Sequence[str],
    known: KnownAnswers,
    seconds: float,
    users: int,
    breaking: Callable[[Stage], Awaitable[None]],
    seed: int = 0,
) -> tuple[list[Judged], Stage]:
    """`users` spread over the gateways for so many seconds, and on until all is broken that is to be; those under way
    at the end are awaited.
    """
    stage = Stage(seconds)
    beside = asyncio.ensure_future(breaking(stage))

    async def at_gateway(number: int) -> list[Judged]:
        requests = known.requests(seed * 1000 + number)
        asked = Asked(requests, lambda: number not in stage.gone and (stage.left > 0 or not beside.done()))
        share = users // len(urls) + (number < users % len(urls))
        plan = Plan(asked, share)
        result = await run_load(Target(urls[number], BASE, timeout=TIMEOUT), plan, stage.records.append)
        return [Judged(kind, record, number) for kind, record in asked.judged(known, result.records)]

    found = await asyncio.gather(*(at_gateway(number) for number in range(len(urls))))
    await beside
    return [one for part in found for one in part], stage
