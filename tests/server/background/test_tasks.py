"""Work beside the requests: tasks, and threads on which tenants take turns."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from lora_serve.core.errors import ConflictError, InternalError, NotReadyError, RateLimitedError
from lora_serve.server.background.tasks import MAX_WAITING, BackgroundTasks, FairThreads, kept_going


async def test_completed_work_goes_on_without_its_caller() -> None:
    tasks, done = BackgroundTasks(), asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.02)
        done.set()

    caller = asyncio.create_task(tasks.complete(work(), "work"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert not done.is_set()
    await tasks.close()
    assert done.is_set()


async def test_close_does_not_wait_for_ever() -> None:
    tasks = BackgroundTasks()
    task = tasks.start(asyncio.sleep(60), "sleeper")
    await tasks.close(timeout=0.01)
    assert task.cancelled()


async def test_failures_are_logged_but_for_callers_own_mistakes(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: Exception) -> None:
        raise error

    tasks = BackgroundTasks()
    with caplog.at_level(logging.WARNING):
        tasks.start(fail(ZeroDivisionError("ours")), "dividing")
        tasks.start(fail(ConflictError("theirs")), "asking")
        await tasks.close()
    assert "dividing failed" in caplog.text
    assert "theirs" not in caplog.text


async def test_work_that_meets_a_bug_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("lora_serve.server.background.tasks.RESUME_SECONDS", 0.0)
    seen: list[int] = []

    async def work() -> None:
        seen.append(len(seen))
        if len(seen) < 3:
            raise RuntimeError("a bug")

    async with asyncio.timeout(60):
        await kept_going(work, "counting")
    assert seen == [0, 1, 2]
    assert caplog.text.count("counting failed") == 2


PATIENCE = 60.0  # seconds, of a test that fails


class Crowd:
    """Calls that say when they run, and end when they are told to."""

    def __init__(self, threads: FairThreads) -> None:
        self._threads = threads
        self._changed = threading.Condition()
        self._gates: dict[str, threading.Event] = {}
        self._futures: dict[str, Future[str]] = {}
        self.begun: list[str] = []

    def send(self, *names: str) -> None:
        """Each for the tenant that is its first letter."""
        for name in names:
            self._gates[name] = threading.Event()
            self._futures[name] = self._threads.submit(lambda name=name: self._run(name), name[0])

    def end(self, name: str) -> None:
        self._gates[name].set()
        assert self._futures[name].result(PATIENCE) == name

    def saw(self, *names: str) -> None:
        """These have begun, in this order, and no others."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= len(names), PATIENCE)
        assert self.begun == list(names)

    def end_all(self) -> None:
        for gate in self._gates.values():
            gate.set()

    def _run(self, name: str) -> str:
        with self._changed:
            self.begun.append(name)
            self._changed.notify_all()
        self._gates[name].wait(PATIENCE)
        return name


@pytest.fixture
def crowded() -> Iterator[Callable[..., Crowd]]:
    made: list[tuple[FairThreads, Crowd]] = []

    def make(num_threads: int, each: int = 1, **options: object) -> Crowd:
        threads = FairThreads("t", num_threads, each, **options)  # type: ignore[arg-type]
        made.append((threads, Crowd(threads)))
        return made[-1][1]

    yield make
    for threads, crowd in made:
        crowd.end_all()
        threads.close()


def test_tenant_with_many_calls_holds_one_thread_and_another_begins_at_once(crowded: Callable[..., Crowd]) -> None:
    crowd = crowded(2)
    crowd.send("a1", "a2", "a3")
    crowd.saw("a1")
    crowd.send("b1")
    crowd.saw("a1", "b1")


def test_those_that_wait_take_turns(crowded: Callable[..., Crowd]) -> None:
    crowd = crowded(1)
    crowd.send("a1", "a2", "a3", "b1", "b2", "c1")
    for count, name in enumerate(order := ["a1", "b1", "c1", "a2", "b2", "a3"]):
        crowd.saw(*order[: count + 1])
        crowd.end(name)


def test_each_may_hold_some_and_the_one_with_the_fewest_is_next(crowded: Callable[..., Crowd]) -> None:
    crowd = crowded(3, each=2)
    crowd.send("a1", "a2", "a3", "b1", "b2", "c1")
    crowd.saw("a1", "a2", "b1")
    crowd.end("a1")
    crowd.saw("a1", "a2", "b1", "c1")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_whoever_used_up_its_seconds_of_a_minute_comes_last_until_they_are_back(crowded: Callable[..., Crowd]) -> None:
    clock = Clock()
    crowd = crowded(1, seconds_per_minute=30.0, clock=clock)
    crowd.send("a1")
    crowd.saw("a1")
    clock.now = 31.0
    crowd.end("a1")
    crowd.send("x1")
    crowd.saw("a1", "x1")
    crowd.send("a2", "b1", "b2")
    crowd.end("x1")
    crowd.saw("a1", "x1", "b1")
    crowd.end("b1")
    crowd.saw("a1", "x1", "b1", "b2")
    crowd.send("a3", "b3")
    clock.now = 34.0  # of 31 seconds 1.5 are back
    crowd.end("b2")
    crowd.saw("a1", "x1", "b1", "b2", "a2")


def test_over_its_seconds_it_goes_on_while_nobody_else_waits(crowded: Callable[..., Crowd]) -> None:
    clock = Clock()
    crowd = crowded(1, seconds_per_minute=1.0, clock=clock)
    crowd.send("a1", "a2")
    crowd.saw("a1")
    clock.now = 100.0
    crowd.end("a1")
    crowd.saw("a1", "a2")


def test_line_of_one_tenant_has_an_end_and_others_have_their_own(crowded: Callable[..., Crowd]) -> None:
    crowd = crowded(1)
    crowd.send("a", *(f"a{number}" for number in range(MAX_WAITING)))
    with pytest.raises(RateLimitedError) as caught:
        crowd.send("a-one-more")
    assert caught.value.retry_after > 0
    crowd.send("b1")


async def test_error_of_a_call_is_the_callers() -> None:
    threads = FairThreads("t", 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()


@pytest.mark.parametrize(
    "end", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()], ids=lambda end: repr(end)
)
async def test_call_that_would_end_the_thread_ends_itself_alone(
    end: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def call() -> None:
        raise end

    threads = FairThreads("t", 1)
    with pytest.raises(InternalError):
        await threads.run(call)
    assert "wanted to end its thread" in caplog.text
    assert await threads.run(lambda: 5) == 5
    threads.close()


async def test_what_waits_when_it_closes_is_refused_and_what_runs_ends(crowded: Callable[..., Crowd]) -> None:
    threads = FairThreads("t", 1)
    crowd = Crowd(threads)
    crowd.send("a1")
    crowd.saw("a1")
    waiting = asyncio.ensure_future(threads.run(int))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(asyncio.to_thread(threads.close))
    with pytest.raises(NotReadyError):
        await waiting
    crowd.end("a1")
    await closing
    with pytest.raises(NotReadyError):
        await threads.run(int)


async def test_caller_that_left_while_it_waited_is_passed_over(crowded: Callable[..., Crowd]) -> None:
    threads = FairThreads("t", 1)
    crowd = Crowd(threads)
    crowd.send("a1")
    crowd.saw("a1")
    left = asyncio.ensure_future(threads.run(lambda: crowd.begun.append("left"), "b"))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    crowd.send("c1")
    crowd.end("a1")
    crowd.saw("a1", "c1")
    crowd.end("c1")
    threads.close()


class Supply:
    """The system's threads, of which it may give no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_used_up = False
        start = threading.Thread.start

        def start_if_any(thread: threading.Thread) -> None:
            if self.is_used_up and thread.name.startswith("t_"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_any)


@pytest.fixture
def supply(monkeypatch: pytest.MonkeyPatch) -> Supply:
    return Supply(monkeypatch)


async def test_call_for_which_there_is_no_thread_is_refused_and_leaves_nothing(supply: Supply) -> None:
    threads, ran = FairThreads("t", 2), list[str]()
    supply.is_used_up = True
    for _ in range(3):
        with pytest.raises(NotReadyError) as caught:
            await threads.run(lambda: ran.append("refused"), "a")
        assert caught.value.retry_after > 0
        assert not threads.is_busy("a")
    supply.is_used_up = False
    assert await asyncio.wait_for(threads.run(lambda: 5, "a"), PATIENCE) == 5
    assert await asyncio.wait_for(threads.run(lambda: 6, "b"), PATIENCE) == 6
    threads.close()
    assert ran == []


def test_calls_wait_for_the_threads_there_are_where_the_system_gives_no_more(
    supply: Supply, crowded: Callable[..., Crowd]
) -> None:
    crowd = crowded(3)
    crowd.send("a1")
    crowd.saw("a1")
    supply.is_used_up = True
    crowd.send("a2", "b1", "c1", "d1")
    for count, name in enumerate(order := ["a1", "b1", "c1", "d1", "a2"]):
        crowd.saw(*order[: count + 1])
        crowd.end(name)


def test_call_ends_for_its_caller_though_there_is_no_further_thread_for_the_next_one(
    supply: Supply, crowded: Callable[..., Crowd]
) -> None:
    crowd = crowded(2)
    crowd.send("a1", "a2")
    crowd.saw("a1")
    supply.is_used_up = True
    crowd.end("a1")
    crowd.saw("a1", "a2")
    crowd.end("a2")
