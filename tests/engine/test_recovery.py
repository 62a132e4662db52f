"""The loop outlives the engine's own bugs: requests end in words, tables are new, orders are given again."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from lora_serve.adapters.loading.loader import LoadFinished
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Row, RowOutput
from lora_serve.core.errors import DeviceMemoryError, InternalError
from lora_serve.core.messages import (
    Command,
    ErrorEvent,
    Evict,
    FinishEvent,
    FromLoop,
    Pin,
    Reply,
    Resize,
    Stop,
    Submit,
)
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.engine.build import build_engine
from lora_serve.engine.engine import Engine
from lora_serve.engine.loop import EngineLoop, Mail
from tests.engine.world import World, adapter


class Bench:
    """A loop over the fake runner, driven by hand: messages in, `turn` by `turn`."""

    def __init__(self, **settings: Any) -> None:
        self.world = World(**settings)
        self.mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self.engines: list[Engine] = []
        self.events: list[FromLoop] = []
        self.loop = EngineLoop(self.rebuild(), self.mailbox, self.events.extend, self.rebuild)

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    def rebuild(self) -> Engine:
        slices = self.world.settings.engine_slice(), self.world.settings.adapter_slice()
        spec = self.world_spec()
        self.engines.append(build_engine(self.world.runner, spec, self.world.num_blocks, *slices, self.load))
        return self.engines[-1]

    def world_spec(self) -> Any:
        from lora_serve.core.model_spec import ModelSpec

        return ModelSpec("fake", "Fake", 2000, 200, (1000,), 1, {}, 0, "float32", "cpu")

    def load(self, ref: AdapterRef) -> None:
        self.mailbox.put(LoadFinished(ref.digest, ref.digest, None, 0.0))

    def ask(self, name: str, ref: AdapterRef | None = None) -> None:
        uses = () if ref is None else (AdapterUse(ref),)
        sampling = SamplingParams(max_tokens=3)
        self.mailbox.put(Submit(InferenceRequest(name, (1, 2), sampling, uses, arrival_time=time.monotonic())))

    def order(self, command: Any) -> None:
        self.mailbox.put(Command(7, command))

    @property
    def outcomes(self) -> list[Any]:
        """The values and errors with which commands were answered."""
        return [reply.error or reply.value for reply in self.events if isinstance(reply, Reply)]

    def run(self) -> None:
        """Until all that was asked has ended."""
        for _ in range(50):
            self.events += self.loop._read_mail(is_busy=True)
            self.events += self.loop._step()[1]

    def ends(self) -> dict[str, Any]:
        return {e.request_id: e for e in self.events if isinstance(e, FinishEvent | ErrorEvent)}


@pytest.mark.parametrize("bug", [ZeroDivisionError("bug"), SystemExit("bug"), KeyboardInterrupt("bug")], ids=repr)
def test_a_bug_in_a_step_ends_every_request_once_and_the_next_ones_are_right(
    monkeypatch: pytest.MonkeyPatch, bug: BaseException
) -> None:
    def broken(*_: object) -> None:
        raise bug

    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.scheduler, "update", broken)
        bench.ask("r")
        bench.ask("s", adapter("a"))
        bench.run()
    assert {name: type(end.error) for name, end in bench.ends().items()} == {"r": InternalError, "s": InternalError}
    assert len([event for event in bench.events if isinstance(event, ErrorEvent)]) == 2
    assert len(bench.engines) == 2
    bench.ask("t", adapter("a"))
    bench.run()
    assert isinstance(bench.ends()["t"], FinishEvent)


def test_tables_that_can_no_longer_even_be_emptied_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(*_: object) -> None:
        raise AssertionError("a block was freed twice")

    monkeypatch.setattr(bench.engine.scheduler, "update", broken)
    monkeypatch.setattr(bench.engine.scheduler._blocks, "free", broken)
    bench.ask("r")
    bench.run()
    bench.ask("s")
    bench.run()
    assert isinstance(bench.ends()["r"].error, InternalError)
    assert isinstance(bench.ends()["s"], FinishEvent)
    stats = bench.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_slots_are_empty_then_hold_again_what_was_pinned_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_loras=3)
    bench.order(Resize(max_loras=2))
    bench.order(Pin(adapter("pinned")))
    bench.ask("r", adapter("used"))
    bench.run()
    cleared: list[int] = []
    clear = bench.world.runner.clear_slot
    monkeypatch.setattr(bench.world.runner, "clear_slot", lambda index: (cleared.append(index), clear(index))[1])
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine.scheduler, "schedule", lambda *_: 1 / 0)
        bench.ask("s")
        bench.run()
    assert {0, 1, 2} <= set(cleared)
    stats = bench.engine.stats()
    assert stats.max_loras == 2
    assert {(slot.digest, slot.pinned) for slot in stats.slots} == {("sha256:pinned", True), ("sha256:used", False)}
    assert bench.outcomes == [None, None]


def test_a_command_that_waits_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.engine.residency._submit = lambda ref: None
    bench.order(Pin(adapter("cold")))
    bench.run()
    monkeypatch.setattr(bench.engine.scheduler, "schedule", lambda *_: 1 / 0)
    bench.ask("r")
    bench.run()
    assert [type(outcome) for outcome in bench.outcomes] == [InternalError]


def test_what_was_to_leave_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.ask("r", adapter("deleted"))
    bench.ask("s", adapter("kept"))
    bench.events += bench.loop._read_mail(is_busy=True)
    for _ in range(2):  # they run
        bench.events += bench.loop._read_mail(is_busy=True)
        bench.events += bench.loop._step()[1]
    bench.order(Evict("sha256:deleted", forget=True))
    bench.events += bench.loop._read_mail(is_busy=True)
    assert bench.outcomes == []  # it waits for the row
    monkeypatch.setattr(bench.engine.scheduler, "schedule", lambda *_: 1 / 0)
    bench.run()
    assert bench.outcomes == [None]
    assert bench.engine.stats().host_digests == ("sha256:kept",)
    assert [slot.digest for slot in bench.engine.stats().slots] == ["sha256:kept"]


def test_a_load_that_began_before_is_taken_by_nobody() -> None:
    bench = Bench()
    bench.mailbox.put(LoadFinished("sha256:unknown", "sha256:unknown", None, 0.0))
    bench.ask("r")
    bench.run()
    assert len(bench.engines) == 1
    assert isinstance(bench.ends()["r"], FinishEvent)
    assert bench.engine.stats().host_digests == ()


def test_bug_after_bug_each_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    for index in range(5):
        monkeypatch.setattr(bench.engine.scheduler, "schedule", lambda *_: 1 / 0)
        bench.ask(f"r{index}")
        bench.run()
    bench.ask("last")
    bench.run()
    assert isinstance(bench.ends()["last"], FinishEvent)
    assert sum(isinstance(end, ErrorEvent) for end in bench.ends().values()) == 5


def test_the_loop_ends_when_it_is_told_even_after_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.engine.scheduler, "next_deadline", lambda *_: 1 / 0)
    bench.ask("r")
    bench.mailbox.put(Stop())
    bench.loop.run()
    assert isinstance(bench.ends()["r"], ErrorEvent)


def test_an_adapter_that_did_not_get_into_its_slot_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    load, tries = bench.world.runner.load_slot, list[str]()

    def short_of_memory(slot: Any, value: str) -> None:
        tries.append(slot.digest)
        if len(tries) == 1:
            raise DeviceMemoryError("no memory for the slot")
        load(slot, value)

    def refused(row: Row) -> RowOutput:
        """As the real runner does, where a slot is not what the row was promised."""
        if any(adapter.slot.index not in bench.world.runner.slots for adapter in row.adapters):
            return RowOutput(row.sequence_id, None, error=InternalError("the slot does not hold it"))
        return run_row(row)

    run_row = bench.world.runner._row
    monkeypatch.setattr(bench.world.runner, "_row", refused)
    monkeypatch.setattr(bench.world.runner, "load_slot", short_of_memory)
    bench.ask("r", adapter("a"))
    bench.ask("beside")
    bench.run()
    bench.ask("again", adapter("a"))
    bench.run()
    ends = bench.ends()
    assert isinstance(ends["r"], ErrorEvent)
    assert isinstance(ends["beside"], FinishEvent)
    assert isinstance(ends["again"], FinishEvent)
    assert len(bench.engines) == 1
    assert tries == ["sha256:a", "sha256:a"]
