"""The mock keeps the seam's promises."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from lora_serve.client.base import EngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, InternalError, NotReadyError, QueueFullError
from lora_serve.core.messages import Event, Evict, FinishEvent, Pin, Prefetch, PromptEvent, TokenEvent
from lora_serve.core.request import AdapterUse, FinishReason, InferenceRequest, SamplingParams
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.engine.queue_gate import QueueGate
from tests.mock_engine import MockEngineClient, MockReply


def adapter(number: int) -> AdapterRef:
    return AdapterRef("acme", f"acme/{number}", 1, f"sha256:{number:064x}", 8, 1000)


async def all_of(client: EngineClient, request: InferenceRequest) -> list[Event]:
    return [event async for event in client.infer(request)]


@pytest.fixture
async def client() -> MockEngineClient:
    mock = MockEngineClient(vocab_size=100)
    await mock.start()
    return mock


async def test_prompt_comes_first_and_the_end_last(client: MockEngineClient) -> None:
    events = await all_of(client, InferenceRequest("r", (1, 2), SamplingParams(max_tokens=3)))
    assert isinstance(events[0], PromptEvent)
    assert [type(event) for event in events[1:-1]] == [TokenEvent] * 3
    assert events[-1] == FinishEvent("r", FinishReason.LENGTH)
    assert client.aborted == []


async def test_answers_depend_on_prompt_and_adapter_and_on_nothing_else(client: MockEngineClient) -> None:
    first = await all_of(client, InferenceRequest("a", (1, 2)))
    assert [event.token_id for event in first if isinstance(event, TokenEvent)] == [
        event.token_id for event in await all_of(client, InferenceRequest("a", (1, 2))) if isinstance(event, TokenEvent)
    ]
    assert first != await all_of(client, InferenceRequest("a", (1, 3)))
    assert first != await all_of(client, InferenceRequest("a", (1, 2), adapters=(AdapterUse(adapter(1)),)))


async def test_leaving_early_is_an_abort(client: MockEngineClient) -> None:
    async with aclosing(client.infer(InferenceRequest("r", (1,)))) as events:  # type: ignore[type-var]
        async for _ in events:
            break
    assert client.aborted == ["r"]
    assert (await client.stats()).num_running == 0


async def test_scripted_error_comes_where_it_was_put(client: MockEngineClient) -> None:
    client.script = lambda request: MockReply(error=InternalError("x"), error_after=2)
    events = client.infer(InferenceRequest("r", (1,)))
    assert [type(await anext(events)) for _ in range(3)] == [PromptEvent, TokenEvent, TokenEvent]
    with pytest.raises(InternalError):
        await anext(events)
    assert client.aborted == []


async def test_stop_id_ends_the_sequence(client: MockEngineClient) -> None:
    client.script = lambda request: MockReply(token_ids=[5, 6, 7])
    events = await all_of(client, InferenceRequest("r", (1,), SamplingParams(stop_token_ids=(6,))))
    assert events[-1] == FinishEvent("r", FinishReason.STOP, 6)


async def test_gate_holds_the_request_in_the_queue(client: MockEngineClient) -> None:
    gate = asyncio.Event()
    client.script = lambda request: MockReply(gate=gate)
    task = asyncio.create_task(all_of(client, InferenceRequest("r", (1,), adapters=(AdapterUse(adapter(1)),))))
    await asyncio.sleep(0)
    stats = await client.stats()
    assert (stats.num_waiting, stats.waiting_adapters) == (1, ("acme/1",))
    gate.set()
    await task
    assert (await client.stats()).num_waiting == 0


async def test_full_queue_and_stopped_engine_refuse(client: MockEngineClient) -> None:
    client.gate = QueueGate(QueueLimits(max_queue=1))
    client.gate.enter((InferenceRequest("other", (1,)),))
    with pytest.raises(QueueFullError):
        await all_of(client, InferenceRequest("r", (1,)))
    await client.stop()
    with pytest.raises(NotReadyError):
        await all_of(client, InferenceRequest("r", (1,)))


async def test_residency_commands_move_adapters(client: MockEngineClient) -> None:
    await client.adapters(Prefetch(adapter(1)))
    await client.adapters(Pin(adapter(2)))
    await client.adapters(Evict(adapter(1).digest))
    assert [(slot.name, slot.pinned) for slot in (await client.stats()).slots] == [("acme/2", True)]
    client.command_error = AdapterUnavailableError("x")
    with pytest.raises(AdapterUnavailableError):
        await client.adapters(Prefetch(adapter(1)))
