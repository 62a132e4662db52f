"""The thread host: events to whoever waits, aborts, commands, errors that do not end the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import pytest

from lora_serve.client.thread import ThreadEngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.errors import (
    AdapterUnavailableError,
    CapacityError,
    InternalError,
    NotReadyError,
    QueueFullError,
    RequestTimeoutError,
)
from lora_serve.core.messages import Evict, FinishEvent, Pin, PromptEvent, SmokeTest, TokenEvent, Unpin
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.loop import Mail
from lora_serve.engine.queue_gate import QueueGate
from tests.engine.fake_runner import next_token
from tests.engine.world import World, adapter


@pytest.fixture
async def client() -> Any:
    """Over the fake runner; adapters load at once, one named "broken" never."""
    world, mailbox = World(max_num_seqs=4), queue.SimpleQueue[Mail]()

    def submit(ref: AdapterRef) -> None:
        error = AdapterUnavailableError("it is broken") if ref.name == "broken" else None
        mailbox.put(LoadFinished(ref.digest, None if error else ref.digest, error, 0.0))

    world.residency._submit = submit
    client = ThreadEngineClient(world.engine, mailbox, QueueGate(QueueLimits()))
    await client.start()
    yield client
    await client.stop()


def request(name: str, ref: AdapterRef | None = None, max_tokens: int = 4, **fields: Any) -> InferenceRequest:
    uses = () if ref is None else (AdapterUse(ref),)
    return InferenceRequest(
        name, (1, 2), SamplingParams(max_tokens=max_tokens), uses, arrival_time=time.monotonic(), **fields
    )


async def test_events_come_in_order_and_end(client: ThreadEngineClient) -> None:
    events = [event async for event in client.infer(request("r", adapter("a")))]
    assert isinstance(events[0], PromptEvent)
    assert isinstance(events[-1], FinishEvent)
    tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
    assert tokens[0] == next_token("sha256:a", [1, 2])
    assert len(tokens) == 4


async def test_many_at_once_get_their_own(client: ThreadEngineClient) -> None:
    async def first(index: int) -> int:
        ref = adapter("ab"[index % 2])
        events = [event async for event in client.infer(request(f"r{index}", ref))]
        return next(event.token_id for event in events if isinstance(event, TokenEvent))

    found = await asyncio.gather(*(first(index) for index in range(40)))
    assert found == [next_token(f"sha256:{'ab'[index % 2]}", [1, 2]) for index in range(40)]


async def test_leaving_the_loop_aborts(client: ThreadEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    run = client._engine.execution.runner.run

    def run_slowly(batch: Batch) -> list[RowOutput]:
        time.sleep(0.01)
        return run(batch)

    monkeypatch.setattr(client._engine.execution.runner, "run", run_slowly)
    async with aclosing(client.infer(request("r", max_tokens=190))) as events:  # type: ignore[type-var]
        await anext(aiter(events))
        assert (await client.stats()).num_running == 1
    stats = await client.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)


async def test_error_of_an_adapter_is_raised_to_its_caller(client: ThreadEngineClient) -> None:
    with pytest.raises(AdapterUnavailableError, match="broken"):
        [_ async for _ in client.infer(request("r", adapter("broken")))]
    with pytest.raises(AdapterUnavailableError, match="broken"):
        await client.adapters(Pin(adapter("broken")))
    assert len([_ async for _ in client.infer(request("s"))]) == 6


async def test_deadline_wakes_an_idle_loop(client: ThreadEngineClient) -> None:
    client._engine.residency._submit = lambda ref: None  # the load never ends
    late = request("r", adapter("slow"), deadline=time.monotonic() + 0.05)
    with pytest.raises(RequestTimeoutError):
        async with asyncio.timeout(60):
            [_ async for _ in client.infer(late)]


async def test_commands_are_answered_when_done(client: ThreadEngineClient) -> None:
    await client.adapters(Pin(adapter("a")))
    await client.adapters(Evict("sha256:a"))
    assert (await client.stats()).slots[0].pinned  # and so it stayed
    await client.adapters(Unpin("sha256:a"))
    await client.adapters(Evict("sha256:a"))
    assert (await client.stats()).slots == ()


async def test_a_bug_in_the_step_ends_the_requests_and_not_the_loop(
    client: ThreadEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(client._engine.scheduler, "update", lambda *_: 1 / 0)
        with pytest.raises(Exception, match="engine failed"):
            [_ async for _ in client.infer(request("r"))]
    assert len([_ async for _ in client.infer(request("s"))]) == 6


@pytest.mark.parametrize("part", ["update", "add"])
async def test_lack_of_memory_in_the_loop_is_overload(
    client: ThreadEngineClient, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(client._engine.scheduler, part, Mock(side_effect=MemoryError))
        with pytest.raises(CapacityError, match="memory"):
            [_ async for _ in client.infer(request("r"))]
    assert len([_ async for _ in client.infer(request("s"))]) == 6


async def test_a_bug_in_taking_a_message_is_answered_and_the_loop_goes_on(
    client: ThreadEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(client._engine.scheduler, "add", lambda _: 1 / 0)
        with pytest.raises(InternalError):
            [_ async for _ in client.infer(request("r"))]
        patch.setattr(client._engine, "command", lambda _: 1 / 0)
        with pytest.raises(InternalError):
            await client.adapters(Pin(adapter("a")))
    assert len([_ async for _ in client.infer(request("s"))]) == 6


async def test_after_stop_waiting_callers_and_new_ones_are_refused() -> None:
    world = World()
    client = ThreadEngineClient(world.engine, queue.SimpleQueue(), QueueGate(QueueLimits()))
    world.residency._submit = lambda ref: None
    await client.start()
    waiting = asyncio.create_task(anext(aiter(client.infer(request("r", adapter("a"))))))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    await client.stop()
    with pytest.raises(NotReadyError):
        await waiting
    with pytest.raises(NotReadyError):
        await client.stats()


async def test_nothing_is_sent_to_a_thread_that_has_told_its_end_and_is_not_gone_yet(
    client: ThreadEngineClient,
) -> None:
    """Nobody would answer: a registration that came in that moment held up the end of the server for two minutes."""
    client._lose()
    with pytest.raises(NotReadyError):
        await client.stats()


async def test_probe_is_answered_with_what_the_runner_saw(client: ThreadEngineClient) -> None:
    found = await client.adapters(SmokeTest(adapter("a"), (1, 2, 3)))
    assert found is not None
    assert not found.is_noop
    nothing = await client.adapters(SmokeTest(adapter("noop"), (1, 2, 3)))
    assert nothing is not None
    assert nothing.is_noop
    stats = await client.stats()
    assert stats.slots == (), "a smoke test takes no slot of the table"


async def test_probe_of_an_adapter_that_cannot_be_had_is_an_error(client: ThreadEngineClient) -> None:
    with pytest.raises(AdapterUnavailableError, match="broken"):
        await client.adapters(SmokeTest(adapter("broken"), (1,)))


async def test_a_full_queue_refuses_in_the_middle_of_a_step(
    client: ThreadEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.gate = QueueGate(QueueLimits(max_queue=1))
    run, is_running, may_end = client._engine.execution.runner.run, threading.Event(), threading.Event()

    def run_when_told(batch: Batch) -> list[RowOutput]:
        is_running.set()
        may_end.wait(60)
        return run(batch)

    monkeypatch.setattr(client._engine.execution.runner, "run", run_when_told)
    first = asyncio.create_task(_tokens(client, request("r")))
    await asyncio.to_thread(is_running.wait, 60)
    with pytest.raises(QueueFullError):
        await _tokens(client, request("s"))
    may_end.set()
    assert await first == 4


async def test_who_has_started_or_left_waits_no_longer(
    client: ThreadEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client._engine.residency._submit = lambda ref: None  # the load never ends
    cold = asyncio.create_task(_tokens(client, request("cold", adapter("a"))))
    failing = asyncio.create_task(_tokens(client, request("late", adapter("b"), deadline=time.monotonic() + 0.02)))
    async with aclosing(client.infer(request("warm"))) as events:  # type: ignore[type-var]
        await anext(aiter(events))
        assert {name for name in client.gate._waiting if name != "late"} == {"cold"}
    with pytest.raises(RequestTimeoutError):
        await failing
    assert set(client.gate._waiting) == {"cold"}
    cold.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cold
    assert client.gate.num_requests == 0


async def _tokens(client: ThreadEngineClient, asked: InferenceRequest) -> int:
    async with aclosing(client.infer(asked)) as events:  # type: ignore[type-var]
        return sum([isinstance(event, TokenEvent) async for event in events])
