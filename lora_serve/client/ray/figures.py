"""A fleet's figures: those of all replicas, of which some may be silent, and of those that are no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping

from lora_serve.client.ray.attached import AttachedReplicas
from lora_serve.client.ray.link import ReplicaLink
from lora_serve.core.errors import LoraServeError, NotReadyError
from lora_serve.core.figures import added, counters_of
from lora_serve.core.live import EngineView, name_replica
from lora_serve.core.stats import EMPTY, EngineStats, ReplicaState, ReplicaStats, merged

_REASONS = {
    ReplicaState.DRAINING: "it ends once its requests have",
    ReplicaState.LOST: "its process ended, or its machine cannot be reached; Ray starts another",
}
LOOK_SECONDS = 2.0  # that a replica may take to tell its figures; else its last ones stand


class FleetFigures:
    """On the event loop."""

    def __init__(self, fleet: AttachedReplicas) -> None:
        self._fleet = fleet
        self._last: dict[str, EngineStats] = {}  # by replica
        self._gone = EMPTY
        self._num_lost = 0

    async def stats(self) -> EngineStats:
        """The figures of all replicas, as those of one engine."""
        links = [link for link in self._fleet.open_links if link.replica not in self._fleet.refused]
        told = await asyncio.gather(*(self._told(link) for link in links))
        self._forget()
        replicas = [self._replica(link, stats) for link, stats in zip(links, told, strict=True)]
        return merged([*replicas, *self._fleet.refused.values()], self._gone, self._num_lost)

    def _replica(self, link: ReplicaLink, stats: EngineStats | None) -> ReplicaStats:
        state, greeting = self._fleet.state(link), link.greeting
        return ReplicaStats(
            replica=link.replica,
            node="" if greeting is None else greeting.node,
            state=state,
            reason=_REASONS.get(state, ""),
            version="" if greeting is None else greeting.version,
            fingerprint="" if link.spec is None else link.spec.fingerprint,
            age=0.0 if greeting is None else greeting.age + time.monotonic() - link.greeted_at,
            num_requests=link.num_open,
            num_servers=link.num_servers,
            stats=stats,
        )

    async def _told(self, link: ReplicaLink) -> EngineStats | None:
        try:
            if link.spec is not None:  # it was reached
                async with asyncio.timeout(LOOK_SECONDS):
                    self._last[link.replica] = await link.stats()
        except (TimeoutError, LoraServeError):
            pass
        return self._last.get(link.replica)

    def _forget(self) -> None:
        """Counters of replicas that are no more go on counting: none ever falls."""
        for replica, is_lost in self._fleet.take_gone():
            self._num_lost += is_lost
            if (stats := self._last.pop(replica, None)) is not None:
                self._gone = added(self._gone, counters_of(stats))


PATIENCE = 0.3  # seconds for the replicas to answer; who needs longer is in a later call's list
RETRY_AFTER = 5.0  # seconds


class FleetWatch:
    """On the event loop."""

    def __init__(self, fleet: AttachedReplicas) -> None:
        self._fleet = fleet
        self._asked: dict[ReplicaLink, asyncio.Task[EngineView]] = {}

    async def looks(self, seen: Mapping[str, int], tenants: Collection[str], *, in_full: bool) -> list[EngineView]:
        """The looks of those that answered by now. Raises NotReadyError if no replica is there."""
        links = self._fleet.links
        if not links:
            raise NotReadyError("No engine is there at present; try again.", RETRY_AFTER)
        for link in links:
            if link not in self._asked:
                look = link.look(seen.get(link.replica, 0), tenants, in_full=in_full)
                self._asked[link] = asyncio.create_task(look, name=f"look at {link.replica}")
        await asyncio.wait(self._asked.values(), timeout=PATIENCE)
        done = {link: task for link, task in self._asked.items() if task.done()}
        for link in done:
            del self._asked[link]
        answered = [(link, task) for link, task in done.items() if _is_answered(task)]
        return [name_replica(task.result(), link.replica) for link, task in answered]

    async def close(self) -> None:
        """Wait for nobody any more."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        self._asked.clear()


def _is_answered(task: asyncio.Task[EngineView]) -> bool:
    """False if the replica was lost meanwhile; other errors are raised."""
    if task.cancelled():
        return False
    error = task.exception()
    if error is not None and not isinstance(error, LoraServeError):
        raise error
    return error is None
