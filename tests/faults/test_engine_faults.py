"""Faults of the step: one row's is that row's end, the machine's is tried again, and nobody gets another's answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.errors import DeviceMemoryError
from lora_serve.engine.scheduling.scheduler import Scheduler
from lora_serve.model.lora.validation import LocalValidator
from tests.canary.asking import Canaries
from tests.canary.figures import at_rest, settled
from tests.canary.house import INSIDE, House
from tests.canary.questions import World
from tests.canary.watch import watching
from tests.faults.injecting import VICTIM, Run, ask, broken_runner, error_of, make_cold, once, ref_of, register_victim
from tests.hostile.sending import as_admin
from tests.oracle import save_adapter

pytestmark = pytest.mark.engines("thread", alone=INSIDE)
PASSING: dict[str, BaseException] = {
    "runtime_error": RuntimeError("injected"),
    "memory_error": MemoryError("injected"),
    "allocator_error": RuntimeError("injected: DefaultCPUAllocator: can't allocate memory"),
    "out_of_memory": torch.OutOfMemoryError("injected"),
    "device_memory": DeviceMemoryError("injected"),
    "floating_point_error": FloatingPointError("injected"),
    "assertion": AssertionError("injected"),
    "recursion": RecursionError("injected"),
    "input_output_error": OSError(5, "injected"),
    "index_error": IndexError("injected"),
}


@pytest.fixture(scope="module", autouse=True)
def victim(house: House, world: World) -> str:
    folder = save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)
    return register_victim(house, folder).digest


def uses(batch: Batch, digest: str) -> bool:
    return any(adapter.slot.digest == digest for row in batch.rows for adapter in row.adapters)


@pytest.mark.parametrize("name", PASSING)
def test_step_that_fails_once_is_run_again_and_nobody_notices(house: House, canaries: Canaries, name: str) -> None:
    expected = ask(house).json["choices"][0]["text"]
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["injected"]
        with broken_runner(house, run=once(PASSING[name])):
            reply = ask(house)
    assert (reply.status, reply.json["choices"][0]["text"]) == (200, expected)


def failing_for(digest: str, error: Exception, from_position: int = 0) -> Run:
    def run(batch: Batch, sound: Callable[[], list[RowOutput]]) -> list[RowOutput]:
        mine = [row for row in batch.rows if any(adapter.slot.digest == digest for adapter in row.adapters)]
        if any(row.start + len(row.token_ids) > from_position for row in mine):
            raise error
        return sound()

    return run


@pytest.mark.parametrize("position", [0, 1, 14])
def test_row_that_always_fails_ends_alone(house: House, canaries: Canaries, victim: str, position: int) -> None:
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["injected", "could not be computed"]
        with broken_runner(house, run=failing_for(victim, RuntimeError("injected: secret detail"), position)):
            reply = ask(house)
    assert (reply.status, error_of(reply)["code"]) == (500, "internal_error")
    assert b"secret" not in reply.body
    assert ask(house).status == 200


def test_row_for_which_there_is_never_memory_is_told_to_come_again(
    house: House, canaries: Canaries, victim: str
) -> None:
    with watching(house, canaries), broken_runner(house, run=failing_for(victim, DeviceMemoryError("injected"))):
        reply = ask(house)
    assert (reply.status, "Retry-After" in reply.headers) == (503, True)
    assert ask(house).status == 200


def test_batches_too_large_for_memory_run_in_parts(house: House, canaries: Canaries) -> None:
    def run(batch: Batch, sound: Callable[[], list[RowOutput]]) -> list[RowOutput]:
        if len(batch.rows) > 2:
            raise DeviceMemoryError("injected")
        return sound()

    with watching(house, canaries), broken_runner(house, run=run):
        assert ask(house).status == 200


def test_memory_that_fails_every_third_time_is_waited_out(house: House, canaries: Canaries) -> None:
    calls = [0]

    def run(batch: Batch, sound: Callable[[], list[RowOutput]]) -> list[RowOutput]:
        calls[0] += 1
        if calls[0] % 3 == 0 and len(batch.rows) > 1:
            raise DeviceMemoryError("injected")
        return sound()

    with watching(house, canaries), broken_runner(house, run=run):
        assert [ask(house).status for _ in range(4)] == [200] * 4


def test_step_that_takes_long_is_waited_for(house: House, canaries: Canaries) -> None:
    pause = threading.Event()

    def run(batch: Batch, sound: Callable[[], list[RowOutput]]) -> list[RowOutput]:
        if not pause.is_set():
            pause.wait(1.0)
            pause.set()
        return sound()

    with watching(house, canaries), broken_runner(house, run=run):
        assert ask(house).status == 200


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e38])
def test_numbers_that_are_none_end_their_own_row(house: House, canaries: Canaries, number: float, victim: str) -> None:
    """The victim's weights rot in memory, in one layer; whoever runs in the same step has other weights."""
    assert ask(house).status == 200
    adapter: Any = house.engine.residency.host._values[victim]
    delta = adapter.deltas[next(iter(adapter.deltas))]
    before = delta.b.clone()
    with watching(house, canaries) as watch, torch.inference_mode():
        watch.expected_in_log = ["not numbers", "request"]
        delta.b.fill_(number)
        try:
            reply = ask(house, max_tokens=3)
        finally:
            delta.b.copy_(before)
    assert reply.status == 500
    assert ask(house).status == 200


@pytest.mark.parametrize("name", ["runtime_error", "memory_error", "out_of_memory", "device_memory"])
def test_slot_that_could_not_be_loaded_is_loaded_again_for_the_next_request(
    house: House, canaries: Canaries, victim: str, name: str
) -> None:
    make_cold(house)
    left = [PASSING[name]]

    def load(slot: Any) -> None:
        if slot.digest == victim and left:
            raise left.pop()

    with watching(house, canaries) as watch, broken_runner(house, load_slot=load):
        watch.expected_in_log = ["injected", "request"]
        assert ask(house).status in (500, 503)
        assert ask(house).status == 200


@pytest.mark.parametrize("verb", ["pin", "prefetch"])
def test_pin_whose_copy_into_a_slot_fails_is_not_said_to_be_done(
    house: House, canaries: Canaries, victim: str, verb: str
) -> None:
    make_cold(house)
    full = [True]

    def load(slot: Any) -> None:
        if slot.digest == victim and full:  # whoever asks: the server makes sure of its pins itself, too
            raise DeviceMemoryError("injected")

    with watching(house, canaries) as watch, broken_runner(house, load_slot=load):
        watch.expected_in_log = ["injected", "request"]
        for status, pinned in ((503, False), (200, verb == "pin")):
            assert as_admin(house, "POST", f"/admin/adapters/{VICTIM}/{verb}").status == status
            assert house.services.catalog.entry(VICTIM).pinned == pinned
            slots = {slot.digest for slot in house.on_loop(house.services.client.stats()).slots}
            assert victim in slots or not pinned, "what is only prefetched may leave for a canary's adapter"
            full.clear()
        assert as_admin(house, "POST", f"/admin/adapters/{VICTIM}/unpin").status == 200


@pytest.mark.parametrize("where", ["schedule", "update", "add"])
def test_bug_of_the_engine_itself_ends_what_runs_and_the_same_process_goes_on(
    house: House, canaries: Canaries, where: str
) -> None:
    """Nobody can be left out: its tables are built anew. Afterwards all is as before, whatever was used before."""
    with watching(house, canaries):
        pass
    before, process = at_rest(house), os.getpid()
    expected = ask(house).json["choices"][0]["text"]
    sound = getattr(Scheduler, where)
    left = [RuntimeError("injected: secret detail")]

    def broken(self: Scheduler, *arguments: Any) -> Any:
        if left and (where == "add" or self._by_request):  # the loop may look once more when nothing is left to do
            raise left.pop()
        return sound(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, where, broken)
        reply = ask(house)
    assert (reply.status, error_of(reply)["code"]) == (500, "internal_error")
    assert b"secret" not in reply.body
    assert os.getpid() == process
    assert ask(house).json["choices"][0]["text"] == expected
    assert settled(house, before) == {}
    with watching(house, canaries):
        pass


@pytest.mark.parametrize("error", [MemoryError("injected"), torch.OutOfMemoryError("injected")], ids=["host", "device"])
def test_registration_for_which_there_is_no_memory_is_refused_and_leaves_nothing(
    house: House, canaries: Canaries, world: World, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_adapter(world.model, world.root / "adapters" / "large", seed=79, std=0.2, r=4)
    sound, left = LocalValidator.num_bytes, [error]

    def num_bytes(*arguments: Any) -> int:
        if left:
            raise left.pop()
        return sound(*arguments)

    monkeypatch.setattr(LocalValidator, "num_bytes", num_bytes)
    body = {"id": "large/x", "source": str(folder)}
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["registering"]
        assert as_admin(house, "POST", "/admin/adapters", body).status == 503
        assert "large/x" not in house.services.catalog.snapshot.entries
        assert as_admin(house, "POST", "/admin/adapters", body).status == 201
        assert ask(house, "large/x").status == 200
        assert as_admin(house, "DELETE", "/admin/adapters/large/x").status == 200


def test_victim_is_what_it_was(house: House, victim: str) -> None:
    assert ref_of(house, VICTIM).digest == victim
