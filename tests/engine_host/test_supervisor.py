"""A lost engine is started again, not too soon and not for ever; a hung one is ended first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lora_serve.core.errors import ConfigError, EngineLostError, ModelError
from lora_serve.engine_host import supervisor as module
from lora_serve.engine_host.supervisor import (
    LONGEST_DELAY,
    WINDOW,
    Restarts,
    Supervisor,
    load_patiently,
    load_timeout,
    until_hung,
)
from lora_serve.server.lifecycle import Lifecycle, ServerState

PATIENCE = 60.0


class FakeHost:
    """Dies when it is told."""

    def __init__(self, can_restart: bool = True) -> None:
        self.can_restart = can_restart
        self.is_warm = False
        self.killed: list[str] = []
        self.answers = True
        self.ends = True  # once it is killed
        self.loading: asyncio.Event | None = None  # nothing is loaded before it is set
        self.load_errors: list[Exception] = []
        self._lost = asyncio.get_running_loop().create_future()

    async def load(self) -> Any:
        if self.load_errors:
            raise self.load_errors.pop(0)
        return "model"

    def warm_up_done(self) -> None:
        """Nothing to do."""

    async def ping(self) -> None:
        if not self.answers:
            await asyncio.Event().wait()

    async def lost(self) -> str:
        return await asyncio.shield(self._lost)

    def kill(self, reason: str) -> None:
        self.killed.append(reason)
        if self.can_restart and self.ends:
            self.die(reason)

    def die(self, reason: str) -> None:
        self._lost.set_result(reason)

    async def start(self) -> None:
        if self._lost.done():
            self._lost = asyncio.get_running_loop().create_future()
        if self.loading is not None:
            loaded = asyncio.ensure_future(self.loading.wait())
            await asyncio.wait([loaded, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                raise EngineLostError(self._lost.result())


class Story:
    """A supervisor at work, and what happened."""

    def __init__(
        self, host: FakeHost, limit: int = 3, step_timeout: float = 0, load_timeout: float | None = None
    ) -> None:
        self.host, self.lifecycle = host, Lifecycle()
        self.seen: list[str] = []
        self.noted: list[str] = []
        self.on_prepare: list[Callable[[], None]] = []
        self.supervisor = Supervisor(
            host, self.lifecycle, Restarts(limit), step_timeout, self.noted.append, load_timeout
        )
        self.task = asyncio.ensure_future(self.supervisor.run(self._start, self._prepare, self._ready))

    async def _start(self) -> None:
        self.seen.append("start")
        await self.host.start()

    async def _prepare(self) -> None:
        self.seen.append("prepare")
        if self.on_prepare:
            self.on_prepare.pop(0)()

    def _ready(self) -> None:
        self.seen.append("ready")
        self.lifecycle.ready()

    async def until(self, *seen: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while tuple(self.seen[-len(seen) :]) != seen:
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_serve.engine_host.supervisor.FIRST_DELAY", 0.001)
    monkeypatch.setattr(module, "_GRACE", 0.2)


async def test_a_lost_engine_is_started_and_prepared_again_before_the_server_is_ready() -> None:
    story = Story(FakeHost())
    await story.until("start", "prepare", "ready")
    story.host.die("a test")
    states: list[ServerState] = []
    story.on_prepare = [lambda: states.append(story.lifecycle.state)]
    await story.until("start", "prepare", "ready", "start", "prepare", "ready")
    assert states == [ServerState.STARTING]
    assert story.lifecycle.state is ServerState.READY
    story.task.cancel()


async def test_after_too_many_restarts_it_gives_up_and_says_why() -> None:
    story = Story(FakeHost(), limit=2)
    story.on_prepare = [lambda: story.host.die("again")] * 3
    async with asyncio.timeout(PATIENCE):
        assert await story.task == "again"
    assert story.seen.count("start") == 3
    assert story.noted == ["again", "again"]  # the restarts, not the end
    assert story.lifecycle.state is ServerState.STARTING


async def test_an_engine_that_cannot_be_started_again_is_lost_at_once() -> None:
    story = Story(FakeHost(can_restart=False))
    await story.until("ready")
    story.host.die("the thread ended")
    async with asyncio.timeout(PATIENCE):
        assert await story.task == "the thread ended"
    assert story.seen.count("start") == 1


async def test_a_mistake_of_the_operator_is_raised_and_not_tried_again() -> None:
    story = Story(FakeHost())

    def mistake() -> None:
        raise ConfigError("--lora-modules a=b: no such folder")

    story.on_prepare = [mistake]
    with pytest.raises(ConfigError, match="no such folder"):
        async with asyncio.timeout(PATIENCE):
            await story.task


async def test_what_fails_because_the_engine_is_lost_is_no_mistake_of_the_operator() -> None:
    story = Story(FakeHost())

    def dies() -> None:
        story.host.die("killed")
        raise ConfigError("--lora-modules a=b: the engine stopped unexpectedly")

    story.on_prepare = [dies]
    await story.until("start", "prepare", "start", "prepare", "ready")
    story.task.cancel()


async def test_a_hung_engine_is_killed_and_another_one_started() -> None:
    story = Story(FakeHost(), step_timeout=0.05)
    await story.until("ready")
    story.host.answers = False
    await story.until("ready", "start")
    assert story.host.killed == ["it made no progress for 0.05 s"]
    story.host.answers = True
    await story.until("start", "prepare", "ready")
    story.task.cancel()


async def test_a_hung_thread_cannot_be_killed_and_is_lost_for_good() -> None:
    story = Story(FakeHost(can_restart=False), step_timeout=0.05)
    story.host.answers = False
    async with asyncio.timeout(PATIENCE):
        assert "no progress" in await story.task


async def test_nothing_is_let_in_while_a_hung_engine_is_ended() -> None:
    story = Story(FakeHost(), step_timeout=0.05)
    story.host.ends = False  # its end takes a while
    await story.until("ready")
    story.host.answers = False
    async with asyncio.timeout(PATIENCE):
        while not story.host.killed:
            await asyncio.sleep(0)
    assert story.lifecycle.state is ServerState.STARTING
    assert story.lifecycle.reason == "The engine is being restarted."
    story.task.cancel()


async def test_a_hung_engine_that_cannot_be_ended_is_lost_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.05)
    story = Story(FakeHost(), step_timeout=0.05)
    story.host.ends = False
    await story.until("ready")
    story.host.answers = False
    async with asyncio.timeout(PATIENCE):
        assert "was still there 0.05 s after it was killed" in await story.task
    assert story.seen.count("start") == 1


async def test_an_engine_that_hangs_while_it_is_loaded_again_is_ended_and_another_one_started() -> None:
    story = Story(FakeHost(), load_timeout=0.05)
    await story.until("ready")
    story.host.loading = asyncio.Event()
    story.host.die("a test")
    async with asyncio.timeout(PATIENCE):
        while not story.host.killed:
            await asyncio.sleep(0)
    assert story.host.killed == ["it was not loaded within 0.05 s"]
    story.host.loading.set()
    await story.until("start", "start", "prepare", "ready")
    assert story.noted == ["a test", "it was not loaded within 0.05 s"]
    story.task.cancel()


async def test_an_engine_that_is_never_loaded_again_and_cannot_be_ended_is_lost_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.05)
    story = Story(FakeHost(), load_timeout=0.05)
    story.host.ends = False
    await story.until("ready")
    story.host.loading = asyncio.Event()
    story.host.die("a test")
    async with asyncio.timeout(PATIENCE):
        assert "it was not loaded within 0.05 s, and was still there" in await story.task


def test_a_later_load_may_take_ten_times_as_long_as_the_first_one_and_ten_minutes_in_any_case() -> None:
    assert load_timeout(3.0) == 600
    assert load_timeout(600.0) == 6000


async def test_a_draining_server_stays_one() -> None:
    story = Story(FakeHost())
    await story.until("ready")
    assert await story.lifecycle.drain(1)
    story.host.die("a test")
    await story.until("start", "prepare", "ready")
    assert story.lifecycle.state is ServerState.DRAINING
    story.task.cancel()


async def test_loading_is_tried_again_when_the_engine_is_lost_and_not_when_the_model_is_wrong() -> None:
    host = FakeHost()
    host.load_errors = [EngineLostError("killed"), EngineLostError("killed")]
    assert await load_patiently(host, Restarts(2)) == "model"
    host.load_errors = [EngineLostError("killed"), EngineLostError("killed")]
    with pytest.raises(ModelError, match="cannot be started: killed"):
        await load_patiently(host, Restarts(1))
    host.load_errors = [ModelError("a picture")]
    with pytest.raises(ModelError, match="a picture"):
        await load_patiently(host, Restarts(5))


def test_restarts_come_later_and_later_and_are_counted_within_the_window() -> None:
    now = [0.0]
    restarts = Restarts(9, clock=lambda: now[0])
    delays = [restarts.next_delay() for _ in range(10)]
    assert delays[0] == 0
    assert delays[9] is None
    assert delays[1:9] == sorted(delays[1:9])
    assert delays[8] == pytest.approx(min(LONGEST_DELAY, 0.001 * 2**7))
    now[0] = WINDOW
    assert restarts.next_delay() == 0


def test_no_restart_is_a_limit_too() -> None:
    assert Restarts(0).next_delay() is None


async def test_who_answers_in_time_never_hangs() -> None:
    asked: list[int] = []

    async def ping() -> None:
        asked.append(1)

    watching = asyncio.ensure_future(until_hung(ping, 0.02))
    async with asyncio.timeout(PATIENCE):
        while len(asked) < 20:
            await asyncio.sleep(0.001)
    assert not watching.done()
    watching.cancel()


async def test_watching_without_a_limit_asks_nobody() -> None:
    async def ping() -> None:
        raise AssertionError("it was asked")

    watching = asyncio.ensure_future(until_hung(ping, 0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()


async def test_time_in_which_the_watcher_itself_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped finds all its timers late; each tick is one tick all the same."""
    ticks: list[float] = []
    wait = asyncio.wait

    async def slow_wait(tasks: Any, *, timeout: float) -> Any:
        ticks.append(timeout)
        return await wait(tasks, timeout=0.001)

    monkeypatch.setattr("lora_serve.engine_host.supervisor.asyncio.wait", slow_wait)
    await until_hung(asyncio.Event().wait, 3.0)  # type: ignore[arg-type]
    assert ticks == [0.75] * 4
