"""Looks at all replicas of a fleet. One that is in a long step, or silent, does not hold up the view of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from lora_serve.client.ray.attached import AttachedReplicas
from lora_serve.client.ray.link import ReplicaLink
from lora_serve.core.errors import LoraServeError, NotReadyError
from lora_serve.core.live import EngineView, name_replica

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
