"""The client of a fleet: each request goes to the replica that the router chooses, and again to another if it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing, nullcontext

from msgspec.structs import replace as changed

from dataclasses import replace

from lora_serve import __version__
from lora_serve.client.ray.link import RETRY_AFTER, ReplicaLink, gateway_names
from lora_serve.client.ray.transport import Transport
from lora_serve.core.config import QueueLimits
from lora_serve.core.errors import EngineLostError, LoraServeError, NotReadyError
from lora_serve.core.messages import (
    AdapterCommand,
    Convert,
    EngineCall,
    Event,
    Evict,
    FromEngine,
    Greeting,
    Pin,
    Prefetch,
    PromptEvent,
    Reported,
    ReplyValue,
    SmokeTest,
    SmokeTestResult,
    ToEngine,
    Unpin,
    Validate,
)
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.routing.fleet_view import FleetView
from lora_serve.routing.routed_request import RoutedRequest, routed
from lora_serve.routing.routers import create_router

_log = logging.getLogger(__name__)
PREPARE_SECONDS = 30.0  # that a new replica's limits and pinned adapters may take before it gets requests
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0  # seconds between tries to attach to a listed replica


class RayEngineClient:
    """See `EngineClient`. Replicas come and go while it runs; a request waits while there is none."""

    def __init__(
        self,
        transport: Transport,
        limits: QueueLimits,
        wait: float,
        others: Callable[[ReplicaLink, FromEngine], None] = lambda link, message: None,
        left: Callable[[ReplicaLink], Awaitable[None]] | None = None,
    ) -> None:
        """`limits`: of one engine. `wait`: seconds that a request waits while no replica is there. `others`: gets what
        replicas ask of the server; `left`: called when a link has ended.
        """
        self.gate = QueueGate(limits)
        self.is_attached = asyncio.Event()  # whether there is a replica
        self._limits = limits
        self._wait = wait
        self._transport = transport
        self._on_other = others
        self._on_left = left
        self._names = gateway_names(uuid.uuid4().hex)
        self._desired = DesiredState(0)
        self._view = FleetView()
        self._router = create_router("affinity", seed=uuid.uuid4().int)
        self._roots_key = b""
        self._links: dict[str, ReplicaLink] = {}  # by replica: attached, and not draining
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by replica: attaches, and attaches again
        self._answers: dict[str, ReplicaLink] = {}  # by answer: choices of one answer run beside one another
        self._num_choices: Counter[str] = Counter()
        self._spec: ModelSpec | None = None
        self._is_stopping = False
        self._listed: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    @property
    def links(self) -> list[ReplicaLink]:
        """The replicas that take requests."""
        return [link for link in self._links.values() if link.is_open]

    async def load(self) -> ModelSpec:
        """The model, once a replica is attached."""
        self._transport.follow(self._follow)
        await self.is_attached.wait()
        assert self._spec is not None
        return self._spec

    async def start(self) -> None:
        """See `EngineClient.start`: returns when there is a replica."""
        await self.load()

    async def infer(self, request: InferenceRequest) -> AsyncGenerator[Event, None]:
        """See `EngineClient.infer`. A request without a token when its replica is lost runs again on another."""
        with self.gate.entered((request,)):
            attempt = 0
            while True:
                link = await self._link_for(request)
                sent = request if attempt == 0 else replace(request, request_id=f"{request.request_id}~{attempt}")
                has_answered = False
                try:
                    async with aclosing(self._answer(link, sent)) as events:
                        async for event in events:
                            if attempt:  # the lost replica may still be at work on the other id
                                self.gate.start(request.request_id)
                                event = changed(event, request_id=request.request_id)
                            has_answered = True
                            yield event
                    return
                except EngineLostError:
                    if has_answered or self._is_stopping:
                        raise
                    attempt += 1
                except NotReadyError:  # it left between the choice and the sending, or it is shutting down
                    if has_answered or self._is_stopping:
                        raise
                    attempt += 1

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        """See `EngineClient.adapters`. Limits and pins are for all replicas; the others for the adapter's home."""
        if isinstance(command, Prefetch | SmokeTest):
            link = await self._home_of(command)
            return await link.adapters(command)
        if isinstance(command, Unpin | Evict):  # even where no replica is: a new one must not bring it back
            self._desired.note(command)
        if not self.links:
            await self._some_link()
        done = await asyncio.gather(*(link.adapters(command) for link in self.links), return_exceptions=True)
        failed = [error for error in done if isinstance(error, BaseException) and not _is_lost(error)]
        if failed:
            raise failed[0]
        self._desired.note(command)
        return None

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        link = await self._some_link()
        return await link.stats()

    async def call(self, message: Callable[[int], EngineCall]) -> ReplyValue:
        """Send a call to the home of the adapter that it is about. Raises the error of a failed call."""
        asked = message(0)
        digests = (asked.digest,) if isinstance(asked, Convert | Validate) else ()
        link = await self._first_of(RoutedRequest("", digests))
        return await link.call(message)

    def tell(self, message: ToEngine) -> None:
        """Send all replicas a message that is not answered."""
        for link in self.links:
            link.tell(message)

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        self._is_stopping = True
        keepers, self._keepers = list(self._keepers.values()), {}
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        self._changed.set()
        await self._transport.close()

    # -- replicas come and go ----------------------------------------------------------------------------------

    def _follow(self, listed: Collection[str]) -> None:
        """Ray Serve says which replicas take requests. One that it no longer names gets none; those it has end."""
        if self._is_stopping:
            return
        self._listed = frozenset(listed)
        for replica in self._links.keys() - self._listed:
            self._leave(self._links[replica])
        for replica in self._listed - self._keepers.keys():
            self._keepers[replica] = asyncio.create_task(self._keep(replica), name=f"keeping {replica}")

    async def _keep(self, replica: str) -> None:
        """Attaches to the replica as long as it is listed, again if the link is lost; then lets its requests end."""
        delay = FIRST_DELAY
        while replica in self._listed:
            link = ReplicaLink(replica, self._names(), self._transport, self.gate, self._take)
            try:
                if await self._attach(link):
                    delay = FIRST_DELAY
                    assert link.lost is not None
                    await self._until_over(link)
            except EngineLostError as error:
                _log.info("%s", error)
            finally:
                self._leave(link)
                await link.close()
                if self._on_left is not None:
                    await self._on_left(link)
            if replica in self._listed:
                await asyncio.sleep(delay)
                delay = min(LONGEST_DELAY, 2 * delay)
        self._keepers.pop(replica, None)

    async def _attach(self, link: ReplicaLink) -> bool:
        greeting, spec = await link.open()
        if not self._fits(greeting, spec):
            return False
        await link.bring_to((*self._desired.limits(), *self._desired.residents()), PREPARE_SECONDS)
        if not link.is_open or link.replica not in self._listed:
            return link.is_open
        self._spec = self._spec or spec
        self._roots_key = greeting.roots_key
        self._links[link.replica] = link
        self._view.add(link.replica)
        if link.report is not None:
            self._view.update(link.report)
        _log.info("replica %s takes requests (%d in all)", link.replica, len(self._links))
        self._resize()
        return True

    def _fits(self, greeting: Greeting, spec: ModelSpec) -> bool:
        if greeting.version != __version__:
            words = f"it runs lora-serve {greeting.version}, this server {__version__}"
        elif self._spec is not None and spec.fingerprint != self._spec.fingerprint:
            words = f"its base model {spec.name} is another than {self._spec.name}"
        else:
            return True
        _log.error("replica %s gets no requests: %s", greeting.replica, words)
        return False

    async def _until_over(self, link: ReplicaLink) -> None:
        """Returns when the link is lost, or the replica is listed no longer and its requests have ended."""
        assert link.lost is not None
        while not link.lost.done() and (link.replica in self._listed or link.num_open):
            await asyncio.wait({link.lost}, timeout=0.2 if link.replica not in self._listed else 1.0)
        if link.lost.done() and not self._is_stopping:
            _log.error("replica %s is lost: %s", link.replica, link.lost.result())

    def _leave(self, link: ReplicaLink) -> None:
        """It gets no further requests."""
        if self._links.get(link.replica) is link:
            del self._links[link.replica]
            self._view.remove(link.replica)
            self._resize()

    def _resize(self) -> None:
        self.gate.limit(self._limits.times(max(1, len(self._links))))
        if self._links:
            self.is_attached.set()
        else:
            self.is_attached.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    def _take(self, link: ReplicaLink, message: FromEngine) -> None:
        if isinstance(message, Reported):
            self._view.update(message.report)
        else:
            self._on_other(link, message)

    # -- requests ----------------------------------------------------------------------------------------------

    async def _link_for(self, request: InferenceRequest) -> ReplicaLink:
        """The replica that the router chooses now; waits while there is none. Raises NotReadyError."""
        if (link := self._answers.get(request.answer_id)) is not None and link in self.links:
            return link
        return await self._first_of(routed(request, self._roots_key))

    async def _first_of(self, request: RoutedRequest) -> ReplicaLink:
        deadline = time.monotonic() + self._wait
        while not self._is_stopping:
            for replica in self._router.choose(request, self._view.replicas):
                link = self._links.get(replica)
                if link is not None and link.is_open:
                    return link
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                raise NotReadyError("No engine is there at present; try again.", 5.0) from None
        raise NotReadyError("The server is shutting down.", 5.0)

    async def _answer(self, link: ReplicaLink, request: InferenceRequest) -> AsyncGenerator[Event, None]:
        """The events of one try. The PromptEvent is held back until the next event, so that nothing was said yet of a
        request that has no token when its replica is lost.
        """
        view = routed(request, self._roots_key)
        self._view.sent(link.replica, view)
        self._answers[request.answer_id] = link
        self._num_choices[request.answer_id] += 1
        prompt: Event | None = None
        try:
            async with aclosing(link.events_of(request, nullcontext())) as events:
                async for event in events:
                    if isinstance(event, PromptEvent):
                        prompt = event
                        continue
                    if prompt is not None:
                        self._view.answering(link.replica, view)
                        yield prompt
                        prompt = None
                    yield event
        finally:
            self._view.ended(link.replica, view)
            self._num_choices[request.answer_id] -= 1
            if not self._num_choices[request.answer_id]:
                del self._num_choices[request.answer_id], self._answers[request.answer_id]

    async def _home_of(self, command: Prefetch | SmokeTest) -> ReplicaLink:
        return await self._first_of(RoutedRequest("", (command.adapter.digest,)))

    async def _some_link(self) -> ReplicaLink:
        return await self._first_of(RoutedRequest(""))


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, EngineLostError | NotReadyError)
