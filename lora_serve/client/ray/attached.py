"""The replicas that a gateway is attached to: attached when Ray Serve lists them, left when it no longer does."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from lora_serve import __version__
from lora_serve.client.ray.link import ReplicaLink, Transport, gateway_names
from lora_serve.core.errors import EngineLostError, LoraServeError, NotReadyError
from lora_serve.core.figures import added, counters_of
from lora_serve.core.live import EngineView, name_replica
from lora_serve.core.messages import FromEngine, Greeting, Reported
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.core.stats import EMPTY, EngineStats, ReplicaState, ReplicaStats, merged
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.routing.fleet_view import FleetView

_log = logging.getLogger(__name__)
PREPARE_SECONDS = 30.0  # that a new replica's limits and pinned adapters may take before it gets requests
FIRST_DELAY, LONGEST_DELAY = 0.2, 1.0  # seconds between tries to attach to a listed replica
_LOOK_SECONDS = 0.1  # between looks whether the requests of a replica that was left have ended
_REASONS = {
    ReplicaState.DRAINING: "it ends once its requests have",
    ReplicaState.LOST: "its process ended, or its machine cannot be reached; Ray starts another",
}
STATS_SECONDS = 2.0  # that a replica may take to tell its figures; else its last ones stand
WATCH_SECONDS = 0.3  # seconds for the replicas to answer; who needs longer is in a later call's list
RETRY_AFTER = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class LinkUsers:
    """The receivers of what links do not handle themselves."""

    asked: Callable[[ReplicaLink, FromEngine], None] = lambda link, message: None  # gets what a replica asks for
    ended: Callable[[ReplicaLink], Awaitable[None]] | None = None  # called when a link has ended


class AttachedReplicas:
    """On the event loop."""

    def __init__(
        self, transport: Transport, gate: QueueGate, limits: QueueLimits, desired: DesiredState, users: LinkUsers
    ) -> None:
        """`limits`: of one engine's queue; `gate` gets as many times these as there are replicas."""
        self.view = FleetView()
        self.spec: ModelSpec | None = None  # of the first replica; none with another one is attached
        self.roots_key = b""
        self.refused: dict[str, ReplicaStats] = {}  # by replica: listed, and not one of this fleet
        self._transport = transport
        self._gate = gate
        self._limits = limits
        self._desired = desired
        self._users = users
        self._names = gateway_names(uuid.uuid4().hex)
        self._listed: frozenset[str] = frozenset()
        self._links: dict[str, ReplicaLink] = {}  # by replica: those that get requests
        self._prepared: set[ReplicaLink] = set()  # those, and others that are brought to the desired state
        self._open: dict[str, ReplicaLink] = {}  # those, and others that are greeted or left
        self._gone: list[tuple[str, bool]] = []
        self._failures: dict[str, str] = {}  # by replica: why it was not reached, the last time
        self._lost: set[str] = set()  # until they are attached again, or no longer tried
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by replica: attaches, and attaches again
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def links(self) -> list[ReplicaLink]:
        """The replicas that take requests."""
        return [link for link in self._links.values() if link.is_open]

    def link(self, replica: str) -> ReplicaLink | None:
        """The replica, if it takes requests."""
        link = self._links.get(replica)
        return link if link is not None and link.is_open else None

    @property
    def prepared(self) -> set[ReplicaLink]:
        """The replicas that got the desired state, some of which may take no requests yet: what is noted later
        has to be sent to each.
        """
        return {link for link in self._prepared if link.is_open}

    @property
    def open_links(self) -> list[ReplicaLink]:
        """The replicas that take requests, will take them, or have taken them."""
        return list(self._open.values())

    def state(self, link: ReplicaLink) -> ReplicaState:
        """Where the replica is between its start and its end."""
        if link.replica in self._lost:
            return ReplicaState.LOST
        if link.replica not in self._listed:
            return ReplicaState.DRAINING
        return ReplicaState.READY if link.replica in self._links else ReplicaState.STARTING

    def take_gone(self) -> list[tuple[str, bool]]:
        """The replicas that are no more since the last call, and whether they were lost: not left in peace."""
        gone, self._gone = self._gone, []
        return gone

    def follow(self, listed: Collection[str]) -> None:
        """Ray Serve says which replicas take requests. One that it no longer names gets none; those it has end."""
        if self._is_closed:
            return
        self._listed = frozenset(listed)
        for replica in self._links.keys() - self._listed:
            self._leave(self._links[replica])
        for replica in self._listed - self._keepers.keys():
            self._keepers[replica] = asyncio.create_task(self._keep(replica), name=f"keeping {replica}")

    async def wait_for_change(self) -> None:
        """Returns when another replica takes requests, or one takes no more."""
        await self._changed.wait()

    async def close(self) -> None:
        """Leave all; what still runs there is aborted."""
        self._is_closed = True
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        self._note_change()

    async def _keep(self, replica: str) -> None:
        """Attaches as long as the replica is listed, again if the link is lost; at last lets its requests end."""
        delay, is_lost = FIRST_DELAY, False
        try:
            while replica in self._listed:
                link = self._open[replica] = ReplicaLink(
                    replica, self._names(), self._transport, self._gate, self._take
                )
                if (ended := await self._attached_once(link)) is not None:
                    delay, is_lost = FIRST_DELAY, ended
                if replica in self._listed:
                    await asyncio.sleep(delay)
                    delay = min(LONGEST_DELAY, 2 * delay)
        finally:
            del self._keepers[replica]
            self._open.pop(replica, None)
            self._lost.discard(replica)
            self._failures.pop(replica, None)
            self._gone.append((replica, is_lost))
            self.refused.pop(replica, None)

    async def _attached_once(self, link: ReplicaLink) -> bool | None:
        """Returns when the link has ended: whether the replica was lost; None: it took no requests."""
        try:
            if not await self._attach(link):
                return None
            await self._until_over(link)
            return link.is_lost
        except EngineLostError as error:
            self._log_failure(link.replica, str(error))
            return None
        finally:
            self._prepared.discard(link)
            self._leave(link)
            await link.close()
            if self._users.ended is not None:
                await self._users.ended(link)

    def _log_failure(self, replica: str, words: str) -> None:
        """Tries follow each other as long as a replica is listed: what they come to is logged when it changes."""
        if self._failures.get(replica) != words:
            self._failures[replica] = words
            _log.info("%s", words)

    async def _attach(self, link: ReplicaLink) -> bool:
        greeting, spec = await link.open()
        if words := self._misfit(greeting, spec):
            if link.replica not in self.refused:
                _log.error("replica %s gets no requests: %s", link.replica, words)
            self.refused[link.replica] = ReplicaStats(
                link.replica, greeting.node, ReplicaState.REFUSED, words, greeting.version, spec.fingerprint
            )
            return False
        self.refused.pop(link.replica, None)
        self._prepared.add(link)  # in one turn with the look at the desired state: later commands go to it, too
        await link.bring_to((*self._desired.limits(), *self._desired.residents()), PREPARE_SECONDS)
        if not link.is_open or link.replica not in self._listed:
            return False
        self.spec = self.spec or spec
        self.roots_key = greeting.roots_key
        self._lost.discard(link.replica)
        self._failures.pop(link.replica, None)
        self._links[link.replica] = link
        self.view.add(link.replica)
        if link.report is not None:
            self.view.update(link.report)
        _log.info("replica %s takes requests (%d in all)", link.replica, len(self._links))
        self._note_change()
        return True

    def _misfit(self, greeting: Greeting, spec: ModelSpec) -> str:
        """Words about why a replica cannot be one of this fleet; empty if it can."""
        if greeting.version != __version__:
            return f"it runs lora-serve {greeting.version}, this server {__version__}"
        if self.spec is not None and spec.fingerprint != self.spec.fingerprint:
            return f"its base model {spec.name} is another than {self.spec.name}"
        return ""

    async def _until_over(self, link: ReplicaLink) -> None:
        """Returns when the link is lost, or the replica is listed no longer and its requests have ended."""
        assert link.lost is not None
        while not link.lost.done() and link.replica in self._listed:
            change = asyncio.create_task(self._changed.wait())  # of this event, before the next one
            try:
                await asyncio.wait({link.lost, change}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
        while not link.lost.done() and link.num_open:
            await asyncio.wait({link.lost}, timeout=_LOOK_SECONDS)
        with suppress(LoraServeError):  # Ray Serve may know of its end before its stream tells
            await link.ping()
        if link.lost.done():
            self._lost.add(link.replica)
            _log.error("replica %s is lost: %s; %d requests were there", link.replica, *link.lost.result())
        else:
            _log.info("replica %s is left: its requests have ended", link.replica)

    def _leave(self, link: ReplicaLink) -> None:
        """It gets no further requests."""
        if self._links.get(link.replica) is link:
            del self._links[link.replica]
            self.view.remove(link.replica)
            self._note_change()

    def _note_change(self) -> None:
        self._gate.limit(self._limits.times(max(1, len(self._links))))
        self._changed.set()
        self._changed = asyncio.Event()

    def _take(self, link: ReplicaLink, message: FromEngine) -> None:
        if isinstance(message, Reported):
            self.view.update(message.report)
        else:
            self._users.asked(link, message)


class FleetFigures:
    """The figures of all replicas, of which some may be silent, and of those that are no more. On the event loop."""

    def __init__(self, fleet: AttachedReplicas) -> None:
        self._fleet = fleet
        self._last: dict[str, EngineStats] = {}  # by replica
        self._gone = EMPTY
        self._num_lost = 0

    async def stats(self) -> EngineStats:
        """The figures of all replicas, as those of one engine."""
        links = [link for link in self._fleet.open_links if link.replica not in self._fleet.refused]
        stats = await asyncio.gather(*(self._stats_of(link) for link in links))
        self._forget()
        replicas = [self._replica(link, one) for link, one in zip(links, stats, strict=True)]
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

    async def _stats_of(self, link: ReplicaLink) -> EngineStats | None:
        try:
            if link.spec is not None:  # it was reached
                async with asyncio.timeout(STATS_SECONDS):
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


class FleetWatch:
    """The views of all replicas. On the event loop."""

    def __init__(self, fleet: AttachedReplicas) -> None:
        self._fleet = fleet
        self._asked: dict[ReplicaLink, asyncio.Task[EngineView]] = {}

    async def views(self, seen: Mapping[str, int], tenants: Collection[str], *, in_full: bool) -> list[EngineView]:
        """The views of those that answered by now. Raises NotReadyError if no replica is there."""
        links = self._fleet.links
        if not links:
            raise NotReadyError("No engine is there at present; try again.", RETRY_AFTER)
        for link in links:
            if link not in self._asked:
                view = link.view(seen.get(link.replica, 0), tenants, in_full=in_full)
                self._asked[link] = asyncio.create_task(view, name=f"view of {link.replica}")
        await asyncio.wait(self._asked.values(), timeout=WATCH_SECONDS)
        done = {link: task for link, task in self._asked.items() if task.done()}
        for link in done:
            del self._asked[link]
        answered = [(link, task) for link, task in done.items() if _is_answered(task)]
        return [name_replica(task.result(), link.replica) for link, task in answered]

    async def close(self) -> None:
        """Ask no replica any more."""
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
