"""Work beside the requests."""

from __future__ import annotations

import asyncio
import logging

import pytest

from lora_serve.core.errors import ConflictError
from lora_serve.server.background.tasks import BackgroundTasks, kept_going


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
