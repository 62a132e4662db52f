"""The engine's thread sleeps until a window ends: neither in small pieces nor longer."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from lora_serve.core.messages import Event, FinishEvent, Stop, Submit
from lora_serve.core.request import InferenceRequest, SamplingParams
from lora_serve.engine.loop import EngineLoop, Mail
from tests.engine.world import World

CREEP = 1e-5  # seconds between two looks at the clock


class Mailbox:
    """Messages that come at their times; whoever waits for one moves the clock."""

    def __init__(self, clock: Clock, coming: list[tuple[float, Mail]]) -> None:
        self._clock, self._coming = clock, coming
        self.sleeps: list[float | None] = []

    def get(self, timeout: float | None = None) -> Mail:
        self.sleeps.append(timeout)
        at = self._coming[0][0]
        if timeout is not None and at > self._clock.now + timeout:
            self._clock.now += timeout
            raise queue.Empty
        self._clock.now = max(self._clock.now, at)
        return self._coming.pop(0)[1]

    def get_nowait(self) -> Mail:
        if not self._coming or self._coming[0][0] > self._clock.now:
            raise queue.Empty
        return self._coming.pop(0)[1]


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        self.now += CREEP
        return self.now


def submit(name: str, at: float) -> tuple[float, Mail]:
    request = InferenceRequest(name, (1, 2, 3), SamplingParams(max_tokens=1), arrival_time=at)
    return at, Submit(request)


@pytest.mark.parametrize("window_ms", [50.0, 0.013, 1e-5])
def test_thread_sleeps_once_until_the_window_ends(monkeypatch: pytest.MonkeyPatch, window_ms: float) -> None:
    clock = Clock()
    fake = SimpleNamespace(monotonic=clock.monotonic, perf_counter=clock.monotonic)
    monkeypatch.setattr("lora_serve.engine.loop.time", fake)
    world = World(batch_wait_ms=window_ms, clock=clock.monotonic)
    ends: dict[str, float] = {}

    def emit(events: list[Event]) -> None:
        ends.update({event.request_id: clock.now for event in events if isinstance(event, FinishEvent)})

    mailbox = Mailbox(clock, [submit("a", 101.0), submit("b", 102.0), (103.0, Stop())])
    loop: Any = EngineLoop(world.engine, mailbox, emit)  # type: ignore[arg-type]
    loop.run()
    window = window_ms / 1000
    for name, at in (("a", 101.0), ("b", 102.0)):
        assert ends[name] == pytest.approx(at + window, abs=20 * CREEP)
    assert len(world.runner.batches) == 2
    assert [sleep for sleep in mailbox.sleeps if sleep is None] == [None, None, None], "no deadline was left over"
    assert len(mailbox.sleeps) <= 3 + 2 * 2, "it slept in pieces"
