"""What every engine client must do, wherever its engine runs: a thread, a child process, a fleet; the mock
where it applies. The fleet is the replicas' own code without Ray between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from lora_serve.client.base import EngineClient
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    RequestTimeoutError,
)
from lora_serve.core.live import EngineView
from lora_serve.core.messages import (
    Evict,
    FinishEvent,
    Pin,
    Prefetch,
    PromptEvent,
    Resize,
    SmokeTest,
    TokenEvent,
    Tune,
    Unpin,
)
from lora_serve.core.request import FinishReason
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.engine.queue_gate import QueueGate
from tests.client.ray.fake_fleet import fleet_client
from tests.engine.fake_runner import EXPLOSION, POISON, next_token
from tests.engine.world import adapter
from tests.engine_host.engine_clients import process_client, request, thread_client
from tests.engine_host.fake_engine import SLOW
from tests.mock_engine import MockEngineClient
from tests.tiers import mostly_nightly

HOSTS = ("thread", "process", "ray", "mock")
# By day a process for what goes another way there; tests/client/test_process.py has more.
ALSO_IN_A_PROCESS = pytest.mark.parametrize("client", HOSTS, indirect=True)
ENGINE_ALSO_IN_A_PROCESS = pytest.mark.parametrize("engine", HOSTS[:3], indirect=True)
PATIENCE = 60.0  # seconds for what must happen some time


@pytest.fixture(params=mostly_nightly(HOSTS, "thread", "ray", "mock"))
async def client(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    if request.param == "mock":
        mock = MockEngineClient(500, gate=QueueGate(QueueLimits()))
        await mock.start()
        yield mock
    else:
        async with started(request.param) as found:
            yield found


@pytest.fixture(params=mostly_nightly(HOSTS[:3], "thread", "ray"))
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    """One with a real engine behind it."""
    async with started(request.param) as found:
        yield found


@asynccontextmanager
async def started(host: str) -> AsyncIterator[EngineClient]:
    if host == "ray":
        async with fleet_client("only") as (_, client):
            await client.start()
            yield client
        return
    async with thread_client() if host == "thread" else process_client() as found:
        await found.start()
        yield found


async def tokens_of(client: EngineClient, asked: Any) -> list[int]:
    return [event.token_id async for event in client.infer(asked) if isinstance(event, TokenEvent)]


def expected(digest: str | None, prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(digest, history))
    return history[len(prompt) :]


@ALSO_IN_A_PROCESS
async def test_events_come_in_order_and_end(client: EngineClient) -> None:
    events = [event async for event in client.infer(request("r", adapter("a")))]
    assert isinstance(events[0], PromptEvent)
    assert [type(event) for event in events[1:]] == [TokenEvent] * 4 + [FinishEvent]
    assert events[-1] == FinishEvent("r", FinishReason.LENGTH)


async def test_start_of_one_that_runs_changes_nothing(client: EngineClient) -> None:
    if not isinstance(client, MockEngineClient) and hasattr(client, "pid"):
        before = client.pid
        await client.start()
        assert client.pid == before
    assert len(await tokens_of(client, request("r"))) == 4


async def test_who_ended_is_not_counted_as_waiting(client: EngineClient) -> None:
    await tokens_of(client, request("r"))
    assert (client.gate.num_requests, client.gate.num_tokens) == (0, 0)


async def test_gate_tells_who_begins_to_be_computed(client: EngineClient) -> None:
    """By that prompts are charged."""
    started: list[str] = []
    asked = [request("r"), request("s")]
    with client.gate.entered(asked, on_start=started.append):
        async for event in client.infer(asked[0]):
            if isinstance(event, PromptEvent):
                assert started == ["r"]
    assert started == ["r"]


async def test_a_full_gate_refuses_before_anything_is_sent(client: EngineClient) -> None:
    client.gate = QueueGate(QueueLimits(max_queue=1))  # type: ignore[misc]
    client.gate.enter((request("other"),))
    with pytest.raises(QueueFullError):
        await tokens_of(client, request("r"))
    client.gate.leave("other")
    assert len(await tokens_of(client, request("r"))) == 4


@ALSO_IN_A_PROCESS
async def test_pinned_adapters_are_resident_until_they_are_not(client: EngineClient) -> None:
    await client.adapters(Pin(adapter("a")))
    assert [(slot.digest, slot.pinned) for slot in (await client.stats()).slots] == [("sha256:a", True)]
    await client.adapters(Unpin("sha256:a"))
    await client.adapters(Evict("sha256:a"))
    assert (await client.stats()).slots == ()


async def test_a_probe_is_answered_with_its_result(client: EngineClient) -> None:
    found = await client.adapters(SmokeTest(adapter("a"), (1, 2, 3)))
    assert found is not None
    assert not found.is_noop


async def test_limits_change_at_run_time(client: EngineClient) -> None:
    await client.adapters(Resize(max_loras=2))
    await client.adapters(Tune(max_num_seqs=3))
    stats = await client.stats()
    assert stats.max_loras == 2
    assert stats.batcher is not None
    assert stats.batcher.limits.max_num_seqs == 3


async def test_after_stop_everything_is_refused(client: EngineClient) -> None:
    await client.stop()
    with pytest.raises(NotReadyError):
        await tokens_of(client, request("r"))
    assert client.gate.num_requests == 0


async def look(client: EngineClient, **options: Any) -> EngineView:
    """The only engine's."""
    (found,) = await client.watch({}, **options)
    return found


@ALSO_IN_A_PROCESS
async def test_a_watched_engine_tells_what_it_does(client: EngineClient) -> None:
    assert (await look(client, in_full=True)).settings is not None
    assert len(await tokens_of(client, request("r", adapter("a"), tenant="acme"))) == 4
    found = await look(client)
    (ended,) = found.ended
    assert (ended.id, ended.tenant, ended.state, ended.reason, ended.num_output) == (
        "r", "acme", "finished", "length", 4
    )  # fmt: skip
    assert [(use.name, use.digest) for use in ended.adapters] == [("a", "sha256:a")]
    rows = [row for step in found.steps for row in step.rows]
    assert {row[0] for row in rows} == {"r"}
    assert sum(row[3] for row in rows) == 4
    assert [(slot.name, slot.digest) for slot in found.slots] == [("a", "sha256:a")]
    (later,) = await client.watch({found.replica: found.mark})
    assert (later.steps, later.ended) == ((), ())


async def test_without_an_engine_there_is_nothing_to_watch(client: EngineClient) -> None:
    await client.stop()
    with pytest.raises(NotReadyError):
        await client.watch({})


async def test_rows_that_run_are_watched(engine: EngineClient) -> None:
    await look(engine)
    events: Any = engine.infer(request("r", max_tokens=150, prompt=[SLOW]))
    async with aclosing(events):
        await anext(events)
        found = await look(engine)
        assert [(one.id, one.state, one.num_prompt) for one in found.requests] == [("r", "running", 1)]
        assert found.requests[0].first_token_ms is not None
        assert found.queue["default"].running == 1
    assert [one.reason for one in (await look(engine)).ended] == ["abort"]


async def test_answer_that_its_caller_ends_is_no_abort(client: EngineClient) -> None:
    await look(client)
    events: Any = client.infer(request("r", max_tokens=150, prompt=[SLOW]))
    async with aclosing(events):
        await anext(events)
        client.answered("r")
        client.answered("of nobody")
    assert [one.reason for one in (await look(client)).ended] == ["stop"]
    assert (await client.stats()).num_running == 0


@ENGINE_ALSO_IN_A_PROCESS
async def test_many_at_once_get_their_own(engine: EngineClient) -> None:
    asked = [request(f"r{index}", adapter("ab"[index % 2]), prompt=[index, 7]) for index in range(40)]
    found = await asyncio.gather(*(tokens_of(engine, one) for one in asked))
    assert found == [expected(f"sha256:{'ab'[index % 2]}", [index, 7], 4) for index in range(40)]


@ENGINE_ALSO_IN_A_PROCESS
async def test_leaving_the_loop_is_the_abort(engine: EngineClient) -> None:
    events: Any = engine.infer(request("r", max_tokens=150, prompt=[SLOW]))
    async with aclosing(events):
        await anext(events)
        assert (await engine.stats()).num_running == 1
    stats = await engine.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)


@ENGINE_ALSO_IN_A_PROCESS
async def test_error_of_an_adapter_is_raised_to_its_caller_alone(engine: EngineClient) -> None:
    with pytest.raises(AdapterUnavailableError, match="broken"):
        await tokens_of(engine, request("r", adapter("broken")))
    for command in (Pin(adapter("broken")), Prefetch(adapter("broken"), to="host"), SmokeTest(adapter("broken"), (1,))):
        with pytest.raises(AdapterUnavailableError, match="broken"):
            await engine.adapters(command)
    assert len(await tokens_of(engine, request("s"))) == 4


async def test_a_refused_limit_says_which(engine: EngineClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await engine.adapters(Tune(max_num_seqs=4000))
    assert caught.value.param == "max_num_seqs"


@pytest.mark.parametrize("bad", [POISON, EXPLOSION])
async def test_only_the_row_at_fault_ends(engine: EngineClient, bad: int) -> None:
    rows = [request("bad", prompt=[1, bad]), *(request(f"r{index}", prompt=[index, 7]) for index in range(3))]
    found = await asyncio.gather(*(tokens_of(engine, row) for row in rows), return_exceptions=True)
    assert isinstance(found[0], Exception)
    assert found[1:] == [expected(None, [index, 7], 4) for index in range(3)]


async def test_deadline_wakes_an_idle_engine(engine: EngineClient) -> None:
    late = request("r", adapter("slow"), deadline=time.monotonic() + 0.2)
    with pytest.raises(RequestTimeoutError):
        async with asyncio.timeout(PATIENCE):
            await tokens_of(engine, late)


async def test_who_waits_at_the_stop_is_told(engine: EngineClient) -> None:
    waiting = asyncio.create_task(tokens_of(engine, request("r", adapter("slow"))))
    while (await engine.stats()).num_waiting == 0:
        pass
    await engine.stop()
    with pytest.raises(NotReadyError, match="shutting down"):
        await waiting
