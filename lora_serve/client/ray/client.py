"""The client of a fleet: each request goes to the replica that a router chooses; to another one if that is lost."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as changed

from lora_serve.client.base import EngineClient
from lora_serve.client.ray.attached import PREPARE_SECONDS, AttachedReplicas, FleetFigures, FleetWatch, LinkUsers
from lora_serve.client.ray.link import ReplicaLink, Transport
from lora_serve.core.errors import EngineLostError, NotReadyError
from lora_serve.core.live import EngineView
from lora_serve.core.messages import (
    AdapterCommand,
    Convert,
    EngineCall,
    Event,
    Evict,
    FinishEvent,
    LostEvent,
    Prefetch,
    PromptEvent,
    ReplyValue,
    SmokeTest,
    SmokeTestResult,
    ToEngine,
    TokenEvent,
    Unpin,
    Validate,
)
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.core.stats import EngineStats
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.routing.fleet_view import RoutedRequest, routed
from lora_serve.routing.routers import create_router

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRY_AFTER = 5.0  # seconds
REFUSED_PAUSE = 0.05  # seconds before a request that a leaving replica refused goes to another one
MAX_TRIES = 3  # of one request: it may itself be what ends the replicas that take it
_ANY = RoutedRequest("")


@dataclass(slots=True)
class _Output:
    """The answer of one try, as far as it came."""

    num_tokens: int = 0
    is_whole: bool = False


class RayEngineClient(EngineClient):
    """Replicas come and go while it runs; a request waits while there is none."""

    def __init__(
        self,
        transport: Transport,
        limits: QueueLimits,
        wait: float,
        users: LinkUsers | None = None,
        router: str = "affinity",
    ) -> None:
        """`limits`: of one engine's queue. `wait`: seconds that a request waits while no replica is there. `router`: a
        file of routing/routers/.
        """
        self.gate = QueueGate(limits)
        self._wait = wait
        self._transport = transport
        self._desired = DesiredState(0)
        self._fleet = AttachedReplicas(transport, self.gate, limits, self._desired, users or LinkUsers())
        self._figures = FleetFigures(self._fleet)
        self._watch = FleetWatch(self._fleet)
        self._router = create_router(router, seed=uuid.uuid4().int)
        self._answers: dict[str, ReplicaLink] = {}  # by answer: its choices run beside one another
        self._num_choices: Counter[str] = Counter()
        self._running: dict[str, tuple[ReplicaLink, str]] = {}  # by request: where it runs, and under which id
        self._is_stopping = False
        self._is_followed = False

    @property
    def is_there(self) -> bool:
        return bool(self._fleet.links)

    @property
    def links(self) -> list[ReplicaLink]:
        """The replicas that take requests."""
        return self._fleet.links

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas that take requests, sorted."""
        return sorted(link.replica for link in self.links)

    async def load(self) -> ModelSpec:
        """The model, once a replica is attached."""
        if not self._is_followed:
            self._is_followed = True
            self._transport.follow(self._fleet.follow)
        while self._fleet.spec is None:
            await self._fleet.wait_for_change()
        return self._fleet.spec

    async def start(self) -> None:
        await self.load()

    async def infer(self, request: InferenceRequest) -> AsyncGenerator[Event, None]:
        """A request whose replica was lost runs on another one, under another id: the lost
        one may still be at work on it. If some of it was given, a LostEvent comes first. Tries that replicas refuse
        follow each other for as long as a request waits while there is none.
        """
        attempt, is_answered, sent = 0, False, request
        refused_until: float | None = None  # of time.monotonic(), from the first refusal on
        with self.gate.entered((request,)), ExitStack() as done:
            done.callback(self._running.pop, request.request_id, None)
            while True:
                view = self._view_of(sent)
                link = await self._link_for(request, view)
                try:
                    async with aclosing(self._answer(link, sent, view)) as events:
                        self._running[request.request_id] = link, sent.request_id
                        async for event in events:
                            is_answered = True
                            if sent is request:
                                yield event
                            else:
                                self.gate.start(request.request_id)
                                yield changed(event, request_id=request.request_id)
                    return
                except (EngineLostError, NotReadyError) as error:
                    if self._is_stopping:
                        raise _shutting_down() from None
                    if attempt == MAX_TRIES - 1:
                        raise
                    lost = error
                if is_answered:
                    yield LostEvent(request.request_id, lost)
                if is_answered or isinstance(lost, EngineLostError):
                    attempt, is_answered, refused_until = attempt + 1, False, None
                else:  # refused before it was computed
                    refused_until = refused_until or time.monotonic() + self._wait
                    if time.monotonic() >= refused_until:
                        raise lost
                    await asyncio.sleep(REFUSED_PAUSE)
                sent = replace(request, request_id=f"{request.request_id}~{attempt}") if attempt else request

    def answered(self, request_id: str) -> None:
        if request_id in self._running:
            link, sent = self._running[request_id]
            link.answered(sent)

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        """Limits and pins are for all replicas, what is tried or fetched for one."""
        if isinstance(command, Prefetch | SmokeTest):
            return await (await self._home_of(command.adapter.digest)).adapters(command)
        if isinstance(command, Unpin | Evict):  # even if no replica does it: a new one must not bring it back
            self._desired.note(command)
        await self._first_of(_ANY)
        asked: set[ReplicaLink] = set()
        while left := self._fleet.prepared - asked:  # others may come while these are at work
            asked |= left
            done = await asyncio.gather(*(self._done_by(link, command) for link in left), return_exceptions=True)
            for error in done:  # a replica that was lost meanwhile need not know
                if isinstance(error, BaseException) and not isinstance(error, EngineLostError | NotReadyError):
                    raise error
        self._desired.note(command)  # in one turn with the last look: replicas that come now get it
        return None

    async def stats(self) -> EngineStats:
        return await self._figures.stats()

    async def watch(
        self, seen: Mapping[str, int], tenants: Collection[str] = (), *, in_full: bool = False
    ) -> list[EngineView]:
        return await self._watch.views(seen, tenants, in_full=in_full)

    async def call(self, message: Callable[[int], EngineCall]) -> ReplyValue:
        """Send a call to the home of the adapter that it is about. Raises the error of a failed call."""
        asked = message(0)
        link = await (self._home_of(asked.digest) if isinstance(asked, Convert | Validate) else self._first_of(_ANY))
        return await link.call(message)

    def tell(self, message: ToEngine) -> None:
        """Send all replicas a message that is not answered."""
        for link in self._fleet.links:
            link.tell(message)

    async def stop(self) -> None:
        self._is_stopping = True
        await self._watch.close()
        await self._fleet.close()
        await self._transport.close()

    # ----------------------------------------------------------------------------------------------------------

    async def _done_by(self, link: ReplicaLink, command: AdapterCommand) -> None:
        """A replica that takes no requests yet may refuse it as it may refuse those that it is prepared with."""
        if self._fleet.link(link.replica) is link:
            await link.adapters(command)
        else:
            await link.bring_to((command,), PREPARE_SECONDS)

    def _view_of(self, request: InferenceRequest) -> RoutedRequest:
        num_output = 0 if request.pooling is not None else request.sampling.max_tokens
        return routed(request, self._fleet.roots_key, self._fleet.view.expected_output(num_output))

    async def _link_for(self, request: InferenceRequest, view: RoutedRequest) -> ReplicaLink:
        beside = self._answers.get(request.answer_id) if request.answer_id else None
        if beside is not None and beside in self._fleet.links:
            return beside
        return await self._first_of(view)

    async def _home_of(self, digest: str) -> ReplicaLink:
        return await self._first_of(RoutedRequest("", (digest,)))

    async def _first_of(self, request: RoutedRequest) -> ReplicaLink:
        """The replica that the router chooses now, a quiet one only if all are; waits while there is none.

        Raises NotReadyError.
        """
        deadline = time.monotonic() + self._wait
        while not self._is_stopping:
            ranked = self._router.choose(request, self._fleet.view.replicas)
            links = [link for replica in ranked if (link := self._fleet.link(replica)) is not None]
            if links:
                return next((link for link in links if not link.is_quiet), links[0])
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._fleet.wait_for_change()
            except TimeoutError:
                raise NotReadyError("No engine is there at present; try again.", RETRY_AFTER) from None
        raise _shutting_down()

    async def _answer(
        self, link: ReplicaLink, request: InferenceRequest, view: RoutedRequest
    ) -> AsyncGenerator[Event, None]:
        """The events of one try. The PromptEvent is held back until the next one, as it alone answers nothing."""
        prompt: Event | None = None
        with self._counted(link, view, request.answer_id) as output:
            async with aclosing(link.events_of(request, nullcontext())) as events:
                async for event in events:
                    if isinstance(event, PromptEvent):
                        prompt = changed(event, replica=link.replica)
                        continue
                    if prompt is not None:
                        self._fleet.view.answering(link.replica, view)
                        yield prompt
                        prompt = None
                    output.num_tokens += isinstance(event, TokenEvent)
                    output.is_whole = isinstance(event, FinishEvent)
                    yield event

    @contextmanager
    def _counted(self, link: ReplicaLink, request: RoutedRequest, answer: str) -> Iterator[_Output]:
        """For routers, and so that further choices of the answer go the same way."""
        self._fleet.view.sent(link.replica, request)
        self._answers[answer] = link
        self._num_choices[answer] += 1
        output = _Output()
        try:
            yield output
        finally:
            self._fleet.view.ended(link.replica, request, output.num_tokens if output.is_whole else None)
            self._num_choices[answer] -= 1
            if not self._num_choices[answer]:
                del self._num_choices[answer], self._answers[answer]


def _shutting_down() -> NotReadyError:
    return NotReadyError("The server is shutting down.", RETRY_AFTER)
