"""The loop outlives the engine's own bugs: requests end in words, tables are new, orders are given again."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Row, RowOutput
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.errors import (
    AdapterUnavailableError,
    CapacityError,
    DeviceMemoryError,
    InternalError,
    LoraServeError,
    RequestTimeoutError,
)
from lora_serve.core.messages import (
    Abort,
    Command,
    ErrorEvent,
    Event,
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
from lora_serve.engine.engine import Engine, build_engine
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.loop import EngineLoop, Mail
from lora_serve.engine.sequence import Sequence
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
        slices = self.world.settings.part(EngineConfig), self.world.settings.part(AdapterConfig)
        spec = self.world_spec()
        self.engines.append(build_engine(self.world.runner, spec, self.world.num_blocks, *slices, self.load))
        return self.engines[-1]

    def world_spec(self) -> Any:
        from lora_serve.core.model_spec import ModelSpec

        return ModelSpec("fake", "Fake", 2000, 200, (1000,), 1, {}, 0, "float32", "cpu")

    def load(self, ref: AdapterRef) -> None:
        self.mailbox.put(LoadFinished(ref.digest, ref.digest, None, 0.0))

    def ask(self, name: str, ref: AdapterRef | None = None, max_tokens: int = 3, deadline: float | None = None) -> None:
        uses = () if ref is None else (AdapterUse(ref),)
        request = InferenceRequest(
            name, (1, 2), SamplingParams(max_tokens=max_tokens), uses, arrival_time=time.monotonic(), deadline=deadline
        )
        self.mailbox.put(Submit(request))

    def order(self, command: Any) -> None:
        self.mailbox.put(Command(7, command))

    @property
    def outcomes(self) -> list[Any]:
        """The values and errors with which commands were answered."""
        return [reply.error or reply.value for reply in self.events if isinstance(reply, Reply)]

    def run(self) -> None:
        """Until all that was asked has ended."""
        for _ in range(50):
            self.turn()

    def turn(self) -> None:
        self.events += self.loop._read_mail(is_busy=True)
        self.events += self.loop._step()[1]

    def ends(self) -> dict[str, Any]:
        return {e.request_id: e for e in self.events if isinstance(e, FinishEvent | ErrorEvent)}

    def assert_all_failed_once(self, *names: str) -> None:
        ends = [event for event in self.events if isinstance(event, FinishEvent | ErrorEvent)]
        assert sorted(end.request_id for end in ends) == sorted(names)
        assert all(isinstance(end, ErrorEvent) and isinstance(end.error, InternalError) for end in ends)


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
    monkeypatch.setattr(bench.engine.scheduler._blocks.kinds[0], "free", broken)
    bench.ask("r")
    bench.run()
    bench.ask("s")
    bench.run()
    assert isinstance(bench.ends()["r"].error, InternalError)
    assert isinstance(bench.ends()["s"], FinishEvent)
    stats = bench.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


@pytest.fixture(params=[True, False], ids=["rebuilt", "same tables"])
def bench(request: pytest.FixtureRequest) -> Bench:
    bench = Bench()
    if not request.param:
        bench.loop._rebuild = None
    return bench


def test_a_row_that_ended_in_the_step_in_which_the_next_row_meets_a_bug_ends_with_an_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = bench.engine.scheduler.outputs
    sound = outputs.take

    def take(sequence: Sequence, *arguments: Any) -> list[Event]:
        if sequence.request.request_id == "second" and sequence.num_output == 1:
            raise ZeroDivisionError("bug")
        return sound(sequence, *arguments)

    monkeypatch.setattr(outputs, "take", take)
    bench.ask("first", max_tokens=2)
    bench.ask("second", max_tokens=9)
    bench.run()
    bench.assert_all_failed_once("first", "second")


def test_a_request_whose_time_is_over_in_the_step_that_meets_a_bug_ends_with_its_own_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ask("late", max_tokens=150, deadline=time.monotonic() + 3600)
    bench.ask("beside", max_tokens=150)
    bench.turn()
    engine = bench.engine
    monkeypatch.setattr(engine, "_clock", lambda: time.monotonic() + 7200)
    with monkeypatch.context() as patch:
        patch.setattr(engine.residency, "take_changes", lambda: 1 / 0)
        bench.turn()
    kinds = [(event.request_id, type(event.error)) for event in bench.events if isinstance(event, ErrorEvent)]
    assert kinds == [("late", RequestTimeoutError), ("beside", InternalError)]


def test_requests_of_an_adapter_that_cannot_be_had_all_end_where_a_bug_comes_between(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.engine.residency._submit = lambda ref: None
    for name in ("first", "second", "third"):
        bench.ask(name, adapter("cold"))
    bench.turn()
    scheduler = bench.engine.scheduler
    sound = scheduler._fail

    def fail(sequence: Sequence, error: LoraServeError) -> ErrorEvent:
        if sequence.request.request_id == "second" and isinstance(error, AdapterUnavailableError):
            raise ZeroDivisionError("bug")
        return sound(sequence, error)

    monkeypatch.setattr(scheduler, "_fail", fail)
    bench.mailbox.put(LoadFinished("sha256:cold", None, AdapterUnavailableError("gone"), 0.0))
    bench.turn()
    bench.assert_all_failed_once("first", "second", "third")


def test_an_end_is_handed_over_though_the_next_message_meets_a_bug_and_new_tables_fail_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.engine.residency._submit = lambda ref: None
    bench.ask("refused", adapter("cold"))
    bench.turn()
    left = [MemoryError("for a moment")]

    def rebuild() -> Engine:
        if left:
            raise left.pop()
        return bench.rebuild()

    monkeypatch.setattr(bench.loop, "_rebuild", rebuild)
    monkeypatch.setattr(bench.engine.scheduler, "add", lambda *_: 1 / 0)
    bench.mailbox.put(LoadFinished("sha256:cold", None, AdapterUnavailableError("gone"), 0.0))
    bench.ask("next")
    bench.turn()
    ends = {name: type(end.error) for name, end in bench.ends().items()}
    assert ends == {"refused": AdapterUnavailableError, "next": CapacityError}


def test_whoever_ended_or_left_before_a_bug_is_told_nothing_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ask("done")
    bench.run()
    bench.ask("gone", max_tokens=150)
    bench.ask("refused", adapter("refused"))
    bench.engine.residency._submit = lambda ref: None
    bench.turn()
    bench.mailbox.put(Abort("gone"))
    bench.mailbox.put(LoadFinished("sha256:refused", None, AdapterUnavailableError("gone"), 0.0))
    bench.events += bench.loop._read_mail(is_busy=True)
    monkeypatch.setattr(bench.engine.scheduler, "schedule", lambda *_: 1 / 0)
    bench.ask("last")
    bench.turn()
    ends = [(end.request_id, type(end)) for end in bench.events if isinstance(end, FinishEvent | ErrorEvent)]
    assert ends == [("done", FinishEvent), ("refused", ErrorEvent), ("last", ErrorEvent)]


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
        bench.turn()
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
