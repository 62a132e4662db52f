"""What becomes of requests when replicas die, hang, leave and come."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lora_serve.client.ray import attached, link
from lora_serve.client.ray.client import MAX_TRIES, RayEngineClient
from lora_serve.client.wire import body_of
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import (
    AdapterUnavailableError,
    EngineLostError,
    LoraServeError,
    NotReadyError,
    QueueFullError,
    RequestTimeoutError,
)
from lora_serve.core.messages import (
    ErrorEvent,
    Evict,
    FinishEvent,
    LostEvent,
    Pin,
    PromptEvent,
    Resize,
    SetTenantBudgets,
    StartedEvent,
    Submit,
    Timings,
    ToEngine,
    TokenEvent,
    Tune,
    Unpin,
)
from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.core.stats import ReplicaState
from lora_serve.core.tenant import TenantBudget
from lora_serve.engine.loader import LoadFinished
from tests.client.ray.fake_fleet import FakeFleet, FakeReplica, Sink, fleet_client
from tests.engine.fake_runner import next_token
from tests.engine.world import adapter
from tests.engine_host.engine_clients import request
from tests.engine_host.fake_engine import SLOW, UNSPEAKABLE

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TICK", 0.05)
    monkeypatch.setattr(attached, "FIRST_DELAY", 0.02)


@asynccontextmanager
async def started(*names: str, **fields: Any) -> AsyncIterator[tuple[FakeFleet, RayEngineClient]]:
    async with fleet_client(*names, **fields) as (fleet, client), asyncio.timeout(PATIENCE):
        if names:
            await client.start()
            await until(lambda: len(client.replicas) == len(names))
        yield fleet, client


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.01)


async def refused(client: RayEngineClient) -> dict[str, str]:
    replicas = (await client.stats()).replicas
    return {one.replica: one.reason for one in replicas if one.state is ReplicaState.REFUSED}


async def until_refused(client: RayEngineClient, replica: str) -> None:
    while replica not in await refused(client):
        await asyncio.sleep(0.01)


async def tokens_of(client: RayEngineClient, asked: InferenceRequest) -> list[int]:
    return [event.token_id async for event in client.infer(asked) if isinstance(event, TokenEvent)]


def expected(prompt: list[int], count: int, digest: str | None = None) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(digest, history))
    return history[len(prompt) :]


async def running_on(client: RayEngineClient, fleet: FakeFleet) -> FakeReplica:
    """The replica with a request."""
    found: list[FakeReplica] = []

    def look() -> bool:
        found[:] = [replica for replica in fleet.replicas.values() if replica.engine.gateways.num_requests]
        return bool(found)

    await until(look)
    return found[0]


async def test_who_had_no_token_is_answered_by_another_replica_and_sees_nothing_of_it() -> None:
    async with started("a", "b") as (fleet, client):
        begun: list[str] = []
        asked = request("r", adapter("slow"), prompt=[3, 4])
        with client.gate.entered((asked,), on_start=begun.append):
            waiting = asyncio.create_task(events_of(client, asked))
            victim = await running_on(client, fleet)
            for name in ("a", "b"):
                fleet.replicas[name].served.makes_slow_ones_wait = False
            lost, other = ("a", "b") if victim is fleet.replicas["a"] else ("b", "a")
            fleet.kill(lost)
            events = await waiting
        assert isinstance(events[0], PromptEvent)
        assert events[0].replica == other
        assert [event.token_id for event in events if isinstance(event, TokenEvent)] == expected(
            [3, 4], 4, adapter("slow").digest
        )
        assert isinstance(events[-1], FinishEvent)
        assert {event.request_id for event in events} == {"r"}
        assert begun == ["r"]
    assert client.gate.num_requests == 0


async def events_of(client: RayEngineClient, asked: InferenceRequest) -> list[Any]:
    return [event async for event in client.infer(asked)]


@asynccontextmanager
async def lost_after_a_token(fleet: FakeFleet, client: RayEngineClient) -> AsyncIterator[tuple[Any, FakeReplica]]:
    """The events of a request behind the one that says so, and the replica that died."""
    events: Any = client.infer(request("r", max_tokens=150, prompt=[SLOW]))
    async with aclosing(events):
        while not isinstance(await anext(events), TokenEvent):
            pass
        victim = await running_on(client, fleet)
        victim.dead.set()
        while not isinstance(event := await anext(events), LostEvent):
            assert isinstance(event, TokenEvent)
        assert isinstance(event.error, EngineLostError)
        yield events, victim


async def test_who_had_a_token_is_told_and_not_asked_again_if_that_is_where_reading_ends() -> None:
    async with started("a", "b") as (fleet, client):
        async with lost_after_a_token(fleet, client) as (_, victim):
            await asyncio.sleep(0.1)
        others = [replica for replica in fleet.replicas.values() if replica is not victim]
        assert all(replica.engine.gateways.num_requests == 0 for replica in others)
        assert len(await tokens_of(client, request("s"))) == 4
    assert client.gate.num_requests == 0


async def test_who_had_a_token_and_reads_on_gets_all_of_the_answer_from_another_replica() -> None:
    async with started("a", "b") as (fleet, client), lost_after_a_token(fleet, client) as (events, _):
        found = [event async for event in events]
    assert [type(found[0]), type(found[-1])] == [PromptEvent, FinishEvent]
    assert [event.token_id for event in found[1:-1]] == expected([SLOW], 150)
    assert {event.request_id for event in found} == {"r"}


async def test_request_that_ends_every_replica_after_a_token_is_not_asked_for_ever() -> None:
    async with started(*"abcde") as (fleet, client):
        lost: list[LostEvent] = []

        async def read() -> None:
            async for event in client.infer(request("r", max_tokens=150, prompt=[SLOW])):
                if isinstance(event, LostEvent):
                    lost.append(event)
                elif isinstance(event, TokenEvent):
                    (await running_on(client, fleet)).dead.set()

        with pytest.raises(EngineLostError):
            await read()
        assert len(lost) == MAX_TRIES - 1


async def test_replica_that_says_nothing_counts_as_lost_and_is_attached_again_when_it_speaks() -> None:
    async with started("a", "b") as (fleet, client):
        waiting = asyncio.create_task(tokens_of(client, request("r", adapter("slow"), prompt=[3])))
        victim = await running_on(client, fleet)
        for replica in fleet.replicas.values():
            replica.served.makes_slow_ones_wait = False
        victim.runs.clear()
        assert await waiting == expected([3], 4, adapter("slow").digest)
        assert len(client.replicas) == 1
        victim.runs.set()
        await until(lambda: len(client.replicas) == 2)
        assert len(victim.gateways) == 1
        await until(lambda: victim.engine.gateways.num_requests == 0)  # what it was asked before is aborted


async def test_quiet_replica_gets_no_new_requests_while_another_one_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENT_TICKS", 10_000)
    async with started("a", "b") as (fleet, client):
        fleet.replicas["a"].runs.clear()
        quiet = client._fleet.link("a")
        assert quiet is not None
        await until(lambda: quiet.is_quiet)
        for number in range(8):
            asked = request(f"r{number}", adapter(f"x{number}"), prompt=[3])
            assert await tokens_of(client, asked) == expected([3], 4, adapter(f"x{number}").digest)
        fleet.replicas["b"].runs.clear()
        await until(lambda: all(one.is_quiet for one in client._fleet.links))
        waiting = asyncio.create_task(
            tokens_of(client, request("last", prompt=[3]))
        )  # none speaks: it takes one of them
        await asyncio.sleep(0.2)
        for replica in fleet.replicas.values():
            replica.runs.set()
        assert await waiting == expected([3], 4)


async def test_request_that_ends_every_replica_is_not_asked_for_ever() -> None:
    names = [str(index) for index in range(MAX_TRIES + 2)]
    async with started(*names) as (fleet, client):
        task = asyncio.create_task(tokens_of(client, request("r", adapter("slow"))))
        for _ in range(MAX_TRIES):
            victim = await running_on(client, fleet)
            name = next(name for name, replica in fleet.replicas.items() if replica is victim)
            fleet.kill(name)
            fleet.unlist(name)
            await until(lambda victim=victim: not victim.engine.gateways.num_requests)  # type: ignore[misc]
        with pytest.raises(EngineLostError):
            await task


async def test_request_whose_answer_cannot_be_told_ends() -> None:
    async with started("a") as (fleet, client):
        with pytest.raises(EngineLostError):
            await tokens_of(client, request("r", prompt=[UNSPEAKABLE]))
        assert await tokens_of(client, request("s", prompt=[5])) == expected([5], 4)
        assert fleet.replicas["a"].engine.gateways.num_requests == 0


async def test_request_waits_while_there_is_no_replica() -> None:
    async with started("a") as (fleet, client):
        fleet.kill("a")
        fleet.unlist("a")
        await until(lambda: not client.is_there)
        waiting = asyncio.create_task(tokens_of(client, request("r", prompt=[5])))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        fleet.add("b")
        assert await waiting == expected([5], 4)
        assert client.is_there


async def test_wait_for_a_replica_has_an_end() -> None:
    async with started("a", wait=0.2) as (fleet, client):
        fleet.unlist("a")
        with pytest.raises(NotReadyError, match="No engine"):
            await tokens_of(client, request("r"))


async def test_tries_of_a_request_that_every_replica_refuses_have_an_end() -> None:
    async with started("a", wait=0.3) as (fleet, client):
        gateways = fleet.replicas["a"].engine.gateways
        plain, num_tries = gateways._take, 0

        def refuse(message: ToEngine) -> None:
            nonlocal num_tries
            if isinstance(message, Submit):
                num_tries += 1
                gateways.send([ErrorEvent(message.request.request_id, NotReadyError("It ends."))])
            else:
                plain(message)

        gateways._take = refuse
        async with asyncio.timeout(5):
            with pytest.raises(NotReadyError, match="It ends"):
                await tokens_of(client, request("r"))
        assert num_tries > 1
    assert client.gate.num_requests == 0


async def test_replica_that_is_taken_away_finishes_its_requests_and_gets_no_new_ones() -> None:
    async with started("a", "b") as (fleet, client):
        running = asyncio.create_task(tokens_of(client, request("r", max_tokens=60, prompt=[SLOW])))
        victim = await running_on(client, fleet)
        name = next(name for name, replica in fleet.replicas.items() if replica is victim)
        fleet.unlist(name)
        await asyncio.gather(*(tokens_of(client, request(f"s{index}")) for index in range(8)))
        assert victim.engine.gateways.num_requests == 1
        assert victim.gateways  # the stream is there as long as it has a request
        assert await running == expected([SLOW], 60)
        await until(lambda: not victim.gateways)  # and no longer, as Ray Serve waits for its end


async def test_gateway_does_not_look_again_and_again_after_replicas_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "_LOOK_SECONDS", 0.001)
    plain, num_looks = asyncio.wait, 0

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return plain(*given, **more)

    async with started("a", "b"):
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "wait", counted)
            await asyncio.sleep(0.3)
    assert num_looks < 60  # of the replicas' reports and the like; looks alone would be hundreds


async def test_figures_tell_a_lost_replica_from_one_that_was_taken_away() -> None:
    async with started("a", "b", "c") as (fleet, client):
        await asyncio.gather(*(tokens_of(client, request(f"r{index}")) for index in range(6)))
        before = await client.stats()
        assert before.num_steps > 0
        fleet.kill("a")
        await until(lambda: len(client.links) == 2)
        states = {one.replica: one.state.value for one in (await client.stats()).replicas or ()}
        assert states == {"a": "lost", "b": "ready", "c": "ready"}
        fleet.unlist("a")
        fleet.unlist("b")
        names: list[str] = ["a"]
        async with asyncio.timeout(10):
            while names != ["c"]:
                await asyncio.sleep(0.02)
                after = await client.stats()
                names = [one.replica for one in after.replicas or ()]
        after = await client.stats()
        assert after.num_replicas_lost == 1
        assert after.num_steps >= before.num_steps


async def test_replica_that_died_counts_as_lost_even_if_ray_serve_tells_it_first() -> None:
    """Ray Serve no longer lists it, and nothing runs there: the stream's end comes last."""
    async with started("a", "b") as (fleet, client):
        replica = fleet.replicas["a"]
        replica.runs.clear()
        fleet.unlist("a")
        await asyncio.sleep(3 * attached._LOOK_SECONDS)
        fleet.kill("a")
        replica.runs.set()
        await until(lambda: len(client._fleet.open_links) == 1)
        assert (await client.stats()).num_replicas_lost == 1


async def test_look_at_a_fleet_leaves_alone_a_replica_that_is_not_reached_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TICK", 60)
    monkeypatch.setattr(attached, "STATS_SECONDS", 60)
    async with started("a") as (fleet, client):
        late = fleet.add("b", listed=False)
        late.is_reachable.clear()
        fleet.list("b")
        await until(lambda: late.num_visits == 1)
        for _ in range(3):
            assert [one.state for one in (await client.stats()).replicas or ()] == [
                ReplicaState.READY,
                ReplicaState.STARTING,
            ]
        asked = [asyncio.create_task(one.ping()) for one in client._fleet.open_links]
        await asyncio.sleep(0.05)
        late.is_reachable.set()
        await asyncio.gather(*asked)  # the question waited, too
        await until(lambda: len(client.replicas) == 2)
        assert late.num_visits == 1


async def test_replica_that_is_not_reached_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "LONGEST_DELAY", 0.02)
    caplog.set_level(logging.INFO, attached.__name__)
    async with started("a") as (fleet, client):
        lost = fleet.add("b", listed=False)
        lost.dead.set()
        fleet.list("b")
        before = client._fleet._names
        tries = itertools.count()
        client._fleet._names = lambda: f"{before()} {next(tries)}"
        await until(lambda: next(tries) > 5)
        assert [line for line in caplog.messages if "cannot be reached" in line] == [
            "Replica b cannot be reached (GoneError: b)."
        ]


async def test_gateway_that_leaves_takes_its_requests_along() -> None:
    async with started("a") as (fleet, client):
        task = asyncio.create_task(tokens_of(client, request("r", max_tokens=150, prompt=[SLOW])))
        replica = await running_on(client, fleet)
        other = RayEngineClient(fleet, QueueLimits(max_queue=16), 5.0)
        fleet_of_both = FollowedByTwo(fleet, other)
        await fleet_of_both.start()
        assert len(await tokens_of(other, request("s"))) == 4
        await client.stop()
        with pytest.raises(NotReadyError, match="shutting down"):
            await task
        await until(lambda: replica.engine.gateways.num_requests == 0)
        assert len(await tokens_of(other, request("t"))) == 4
        await other.stop()


class FollowedByTwo:
    """Lists replicas to another client, too."""

    def __init__(self, fleet: FakeFleet, client: RayEngineClient) -> None:
        self._fleet, self._client = fleet, client

    async def start(self) -> None:
        tell = self._fleet._tell
        await self._client.start()
        self._fleet._tell = tell


async def test_new_replica_has_limits_and_pins_before_it_gets_requests() -> None:
    async with started("a") as (fleet, client):
        budgets = SetTenantBudgets((TenantBudget("t", 10),))
        for command in (Resize(max_loras=2), Tune(max_num_seqs=3), budgets, Pin(adapter("p")), Pin(adapter("q"))):
            await client.adapters(command)
        await client.adapters(Unpin(adapter("q").digest))
        await client.adapters(Evict(adapter("q").digest))
        fleet.unlist("a")
        fleet.add("b")
        await until(lambda: client.replicas == ["b"])
        stats = await client.links[0].stats()
        assert stats.max_loras == 2
        assert stats.batcher is not None
        assert stats.batcher.limits.max_num_seqs == 3
        assert [(slot.digest, slot.pinned) for slot in stats.slots] == [(adapter("p").digest, True)]


async def test_commands_reach_every_replica() -> None:
    async with started("a", "b", "c") as (_, client):
        await client.adapters(Pin(adapter("p")))
        await asyncio.sleep(0.15)
        assert [replica.report.device for replica in client.links] == [(adapter("p").digest,)] * 3


async def slots_of(client: RayEngineClient) -> dict[str, list[tuple[str, bool]]]:
    """The adapters on each replica's device, and whether they are pinned."""
    told = [(one.replica, (await one.stats()).slots) for one in client.links]
    return {replica: [(slot.digest, slot.pinned) for slot in slots] for replica, slots in told}


def finish_load(replica: FakeReplica, ref: AdapterRef, error: LoraServeError | None = None) -> None:
    replica.served.mailbox.put(LoadFinished(ref.digest, None if error else ref.digest, error, 0.0))


async def test_replica_that_comes_while_an_adapter_is_pinned_has_it_too() -> None:
    slow = adapter("slow")
    async with started("a") as (fleet, client):
        pinning = asyncio.create_task(client.adapters(Pin(slow)))
        await until(lambda: fleet.replicas["a"].num_frames > 0)
        fleet.add("b", listed=False).served.makes_slow_ones_wait = False
        fleet.list("b")
        await until(lambda: client.replicas == ["a", "b"])
        finish_load(fleet.replicas["a"], slow)
        await pinning
        assert await slots_of(client) == {"a": [(slow.digest, True)], "b": [(slow.digest, True)]}


@asynccontextmanager
async def prepared() -> AsyncIterator[tuple[FakeFleet, RayEngineClient]]:
    """The replica "b" gets no requests until the load of its pinned adapter is finished."""
    async with started("a") as (fleet, client):
        fleet.replicas["a"].served.makes_slow_ones_wait = False
        await client.adapters(Pin(adapter("slow")))
        late = fleet.add("b")
        await until(lambda: late.num_frames > 0)
        assert client.replicas == ["a"]
        yield fleet, client


async def test_commands_reach_a_replica_that_is_being_prepared() -> None:
    slow = adapter("slow")
    async with prepared() as (fleet, client):

        async def command() -> None:
            for one in (Resize(max_loras=2), Unpin(slow.digest), Evict(slow.digest), Pin(adapter("p"))):
                await client.adapters(one)

        commanding = asyncio.create_task(command())
        await asyncio.sleep(0.1)
        finish_load(fleet.replicas["b"], slow)
        await commanding
        await until(lambda: client.replicas == ["a", "b"])
        pinned = {replica: [one for one, pin in slots if pin] for replica, slots in (await slots_of(client)).items()}
        assert pinned == {"a": [adapter("p").digest], "b": [adapter("p").digest]}
        assert [(await one.stats()).max_loras for one in client.links] == [2, 2]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_command_succeeds_though_a_replica_that_is_being_prepared_refuses_it_or_dies(is_lost: bool) -> None:
    other = replace(adapter("slow"), digest="sha256:other")
    async with prepared() as (fleet, client):
        late = fleet.replicas["b"]
        before = late.num_frames
        pinning = asyncio.create_task(client.adapters(Pin(other)))
        await until(lambda: late.num_frames > before)
        if is_lost:
            fleet.unlist("b")
            fleet.kill("b")
        else:
            finish_load(late, other, AdapterUnavailableError("its store is not there"))
        await pinning
        assert (other.digest, True) in (await slots_of(client))["a"]


@pytest.mark.parametrize("facts", [{"version": "0.0.1"}])
async def test_unlike_replica_gets_no_requests_and_is_named(facts: dict[str, Any]) -> None:
    async with started("a") as (fleet, client):
        fleet.add("b", **facts)
        await until_refused(client, "b")
        assert "0.0.1" in (await refused(client))["b"]
        assert client.replicas == ["a"]


async def test_replica_of_another_base_model_gets_no_requests() -> None:
    async with started("a") as (fleet, client):
        other = fleet.add("b", listed=False)
        other.set_spec(vocab_size=7)
        fleet.list("b")
        await until_refused(client, "b")
        assert "base model" in (await refused(client))["b"]
        assert client.replicas == ["a"]


async def test_queue_holds_as_many_as_all_replicas_together() -> None:
    async with started("a", "b", limits=QueueLimits(max_queue=2)) as (fleet, client):
        client.gate.enter([request(f"r{index}") for index in range(4)])
        with pytest.raises(QueueFullError):
            client.gate.enter([request("more")])
        fleet.unlist("b")
        await until(lambda: len(client.replicas) == 1)
        client.gate.leave("r0")
        with pytest.raises(QueueFullError):
            client.gate.enter([request("more")])


async def test_choices_of_one_answer_run_on_one_replica() -> None:
    async with started("a", "b", "c") as (fleet, client):
        asked = [request(f"r{index}", max_tokens=30, prompt=[SLOW, index], answer_id="x") for index in range(6)]
        tasks = [asyncio.create_task(tokens_of(client, one)) for one in asked]
        replica = await running_on(client, fleet)
        await until(lambda: replica.engine.gateways.num_requests == 6)
        await asyncio.gather(*tasks)


async def test_messages_of_one_turn_are_one_call() -> None:
    async with started("a") as (fleet, client):
        replica = fleet.replicas["a"]
        await asyncio.gather(*(tokens_of(client, request(f"r{index}")) for index in range(40)))
        assert replica.num_frames <= 4


async def test_deadline_holds_on_a_replica_with_another_clock() -> None:
    """The replica says that it is on another machine; its clock is read from its reports."""
    async with started() as (fleet, client):
        fleet.add("far", machine="another")
        await client.start()
        assert abs(client.links[0].clock_offset) < 0.5
        assert len(await tokens_of(client, request("r"))) == 4


@pytest.mark.parametrize("ahead", [1e6, -1e6])
async def test_deadline_holds_before_the_first_report_of_a_replica_with_another_clock(
    ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here() -> float:
        return time.monotonic() - ahead

    async with started() as (fleet, client):
        far = fleet.add("far", listed=False, machine="another")
        far.engine._reporting.cancel()
        monkeypatch.setattr(link, "SILENT_TICKS", 10_000)
        monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=here))
        fleet.list("far")
        await client.start()
        asked = replace(request("r"), arrival_time=here(), deadline=here() + PATIENCE)
        assert len(await tokens_of(client, asked)) == 4
        late = replace(request("s", adapter("slow")), arrival_time=here(), deadline=here() + 0.1)
        with pytest.raises(RequestTimeoutError):
            await tokens_of(client, late)


class ScriptedFleet(FakeFleet):
    """Its replica "half" computes prompts and dies; it says so in frames of its own."""

    async def events(self, replica: str, gateway: str) -> AsyncIterator[bytes]:
        async with aclosing(super().events(replica, gateway)) as frames:  # type: ignore[type-var]
            async for frame in frames:
                yield frame
                if replica == "half" and self.replicas["half"].num_frames:
                    timings = Timings(0.0, 0.0, 0.0)
                    yield body_of([StartedEvent("r"), PromptEvent("r", timings, None)])
                    raise ConnectionResetError


async def test_prompt_without_a_token_is_no_answer_yet() -> None:
    fleet = ScriptedFleet()
    fleet.add("half")
    fleet.replicas["half"].engine.gateways.take = lambda gateway, frame: None  # type: ignore[method-assign]
    client = RayEngineClient(fleet, QueueLimits(max_queue=16), 10.0)
    try:
        async with asyncio.timeout(PATIENCE):
            await client.start()
            waiting = asyncio.create_task(events_of(client, request("r", prompt=[8])))
            await until(lambda: fleet.replicas["half"].num_frames > 0)
            fleet.unlist("half")
            fleet.add("whole")
            events = await waiting
    finally:
        await client.stop()
        await fleet.stop()
    assert [type(event) for event in events] == [PromptEvent, *[TokenEvent] * 4, FinishEvent]


async def test_figures_are_those_of_all_replicas_and_of_those_that_are_no_more() -> None:
    async with started("a", "b") as (fleet, client):
        await asyncio.gather(*(tokens_of(client, request(f"r{index}", prompt=[index, 9])) for index in range(8)))
        before = await client.stats()
        assert {one.replica: one.state for one in before.replicas} == {
            "a": ReplicaState.READY,
            "b": ReplicaState.READY,
        }
        assert before.num_steps == sum(one.stats.num_steps for one in before.replicas if one.stats is not None)
        fleet.kill("a")
        await until(lambda: client.replicas == ["b"])
        fleet.unlist("a")
        after = await client.stats()
        while len(after.replicas) > 1:
            after = await client.stats()
        assert after.num_steps >= before.num_steps
        assert after.num_replicas_lost == 1
        assert [one.replica for one in after.replicas] == ["b"]


async def test_long_step_is_no_silence() -> None:
    """The replica goes on reporting while its engine's thread is in a step."""
    async with started("a") as (fleet, client):
        replica = fleet.replicas["a"]
        replica.served.engine.step = lambda: (time.sleep(0.5), (False, []))[1]  # type: ignore[method-assign, assignment, return-value]
        await asyncio.sleep(0.45)  # twice as long as a replica may say nothing
        assert client.replicas == ["a"]
        assert replica.engine.seconds_without_progress > 0.3


async def test_gateway_that_says_nothing_is_left_and_its_requests_are_aborted() -> None:
    """A network that is cut ends no stream."""
    async with started("a") as (fleet, client):
        replica, links = fleet.replicas["a"], client.links
        sink = Sink()
        replica.engine.gateways.attach("cut off", sink, replica.engine.greeting())
        replica.engine.gateways.take("cut off", body_of([Submit(request("r", max_tokens=190, prompt=[SLOW]))]))
        assert replica.engine.gateways.num_requests == 1
        await sink.is_closed.wait()
        await until(lambda: replica.engine.gateways.num_requests == 0)
        await asyncio.sleep(0.2)
        assert client.links == links  # the client has nothing to ask, and says so
