"""Limits that change while requests run, tenants' floors on device and host, and why adapters left."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import ConflictError, InvalidAdapterError
from lora_serve.core.messages import (
    Evict,
    FinishEvent,
    Pin,
    Prefetch,
    Resize,
    SmokeTest,
    SmokeTestResult,
    Unpin,
)
from lora_serve.engine.slots import SMOKE_TEST_SLOT, SlotTable
from tests.engine.world import World, adapter


def of(tenant: str, name: str, num_bytes: int = 10) -> AdapterRef:
    return dataclasses.replace(adapter(name, num_bytes), tenant=tenant)


def resident(world: World) -> set[str]:
    return {slot.name for slot in world.engine.stats().slots}


# -- the table ---------------------------------------------------------------------------------------------------


def test_indices_begin_after_the_probes_own_and_are_the_lowest_that_are_free() -> None:
    table = SlotTable(3)
    slots = [placed[0] for name in "abc" if (placed := table.place(adapter(name)))]
    assert [slot.index for slot in slots] == [1, 2, 3]
    assert SMOKE_TEST_SLOT not in {slot.index for slot in slots}
    table.remove("sha256:b")
    table.remove("sha256:a")
    placed = table.place(adapter("d"))
    assert placed is not None
    assert placed[0] == SlotRef(1, 2, "sha256:d")


def test_growing_gives_slots_at_once() -> None:
    table = SlotTable(1)
    table.place(adapter("a"))
    table.acquire("sha256:a")
    assert table.place(adapter("b")) is None
    assert table.resize(2, None) == ()
    placed = table.place(adapter("b"))
    assert placed is not None
    assert placed[0].index == 2


def test_shrinking_empties_idle_slots_and_lets_those_in_use_end() -> None:
    table = SlotTable(4)
    for name in "abcd":
        table.place(adapter(name))
    first, second, _ = (table.acquire(f"sha256:{name}") for name in "abc")
    assert [slot.digest for slot in table.resize(1, None)] == ["sha256:d"]
    assert [table.is_leaving(f"sha256:{name}") for name in "abc"] == [True, True, False]
    assert table.release(first), "it can go now"
    table.remove("sha256:a")
    assert table.release(second)
    assert "sha256:c" in table


def test_growing_again_takes_back_what_was_to_leave() -> None:
    table = SlotTable(2)
    for name in "ab":
        table.place(adapter(name))
        table.acquire(f"sha256:{name}")
    table.resize(1, None)
    assert table.is_leaving("sha256:a")
    table.resize(2, None)
    assert not table.is_leaving("sha256:a")


def test_bytes_shrink_as_slots_do() -> None:
    table = SlotTable(4, max_bytes=40)
    for name in "abcd":
        table.place(adapter(name))
    assert [slot.digest for slot in table.resize(4, 25)] == ["sha256:a", "sha256:b"]
    assert table.num_bytes == 20


def test_pinned_adapters_that_would_not_fit_are_said_and_nothing_changes() -> None:
    table = SlotTable(2)
    for name in "ab":
        table.place(adapter(name))
        table.set_pinned(f"sha256:{name}", True)
    for limits in ((1, None), (2, 19)):
        with pytest.raises(ConflictError, match="unpin some first"):
            table.resize(*limits)
    assert (table.num_slots, table.max_bytes, len(table)) == (2, None, 2)


def test_pinning_one_that_was_to_leave_makes_another_leave() -> None:
    table = SlotTable(2)
    slots = {}
    for name in "ab":
        table.place(adapter(name))
        slots[name] = table.acquire(f"sha256:{name}")
    table.resize(1, None)
    table.set_pinned("sha256:a", True)
    assert (table.is_leaving("sha256:a"), table.is_leaving("sha256:b")) == (False, True)
    assert not table.release(slots["a"])
    assert table.release(slots["b"])


# -- the engine --------------------------------------------------------------------------------------------------


def test_running_rows_keep_their_slots_while_the_table_shrinks_and_every_answer_is_right() -> None:
    world = World(max_loras=4)
    for name in "abcd":
        world.add(name, [ord(name)], adapter(name), max_tokens=10)
    for _ in range(3):
        world.step()
    assert world.command(Resize(max_loras=1)) == [None]
    assert len(resident(world)) == 4, "all four are in use"
    world.add("late", [7], adapter("e"))
    world.run()
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    world.check_answers()
    world.check_nothing_held()
    assert len(resident(world)) == 1
    assert world.engine.stats().max_loras == 1
    assert world.engine.stats().tiers["device"].eviction_reasons["shrunk"] == 3


def test_endless_stream_of_requests_does_not_keep_a_slot_that_is_to_leave() -> None:
    world = World(num_blocks=200, max_loras=2, max_num_seqs=16, max_num_batched_tokens=64)
    sizes = []
    for index in range(40):
        for name in "ab":
            world.add(f"{name}{index}", [index], adapter(name), max_tokens=6)
        if index == 10:
            world.command(Resize(max_loras=1))
        world.step()
        sizes.append(len(world.residency.slots))
    assert sizes[5:10] == [2] * 5, "there was never a step without a row on either"
    assert min(sizes[10:]) == 1
    world.run()
    world.check_answers()
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())


def test_grown_table_is_used_at_once() -> None:
    world = World(max_loras=1)
    for name in "abc":
        world.add(name, [ord(name)], adapter(name), max_tokens=8)
    world.step()
    world.command(Resize(max_loras=3))
    world.step()
    assert resident(world) == {"a", "b", "c"}
    world.run()
    world.check_answers()


def test_host_memory_grows_and_shrinks() -> None:
    world = World(max_loras=1)
    for name in "abcd":
        world.add(name, [ord(name)], adapter(name))
        world.run()
    assert len(world.residency.host) == 4
    world.command(Resize(adapter_host_memory=20))
    host = world.engine.stats().tiers["host"]
    assert (host.num_bytes, host.num_items, host.budget_bytes, host.eviction_reasons) == (20, 2, 20, {"shrunk": 2})
    world.command(Resize(max_cpu_loras=1))
    assert len(world.residency.host) == 1
    world.command(Resize(adapter_host_memory=100, max_cpu_loras=10))
    for name in "abcd":
        world.add(f"{name}2", [ord(name)], adapter(name))
        world.run()
    assert len(world.residency.host) == 4
    world.check_answers()


def test_refused_resize_changes_nothing() -> None:
    world = World(max_loras=2)
    for name in "ab":
        world.command(Pin(adapter(name)))
        world.step()
    (refusal,) = world.command(Resize(max_loras=1, adapter_host_memory=1))
    assert isinstance(refusal, ConflictError)
    assert world.engine.stats().max_loras == 2
    assert world.residency.host.max_bytes > 1
    world.command(Unpin("sha256:a"))
    assert world.command(Resize(max_loras=1)) == [None]
    assert resident(world) == {"b"}


def test_probe_runs_in_its_own_slot_while_all_others_are_in_use() -> None:
    world = World(max_loras=1)
    world.add("r", [1], adapter("a"), max_tokens=6)
    world.step()
    world.step()
    assert world.tokens["r"], "it runs"
    replies = world.command(SmokeTest(adapter("b"), (1, 2)))
    world.step()
    assert isinstance(replies[0], SmokeTestResult)
    assert SMOKE_TEST_SLOT not in world.runner.slots
    world.run()
    world.check_answers()
    assert isinstance(world.ends["r"], FinishEvent)


def test_error_of_the_model_in_a_trial_is_the_adapters_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def fail(*_: Any) -> Any:
        raise AttributeError("'LowRankWeight' object has no attribute 'type'")

    monkeypatch.setattr(world.runner, "smoke_test", fail)
    replies = world.command(SmokeTest(adapter("a"), (1, 2)))
    world.run()
    assert isinstance(replies[0], InvalidAdapterError)
    assert "the model fails with it (AttributeError: 'LowRankWeight'" in str(replies[0])
    assert SMOKE_TEST_SLOT not in world.runner.slots


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 5), st.none() | st.integers(1, 6)), max_size=25),
    st.sampled_from(["lru", "cost"]),
)
def test_any_order_of_requests_and_new_limits_gives_right_answers(
    steps: list[tuple[str, int, int | None]], policy: str
) -> None:
    world = World(max_loras=3, adapter_host_memory=60, adapter_eviction=policy)
    for index, (name, num_tokens, num_slots) in enumerate(steps):
        world.add(f"r{index}", [index, 3], of("xy"[ord(name) % 2], name), max_tokens=num_tokens)
        if num_slots is not None:
            world.command(Resize(max_loras=num_slots, adapter_host_memory=10 * num_slots))
        world.step()
    world.run()
    world.check_answers()
    world.check_nothing_held()
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    assert len(world.residency.slots) <= world.residency.slots.num_slots
    assert world.residency.host.num_bytes <= world.residency.host.max_bytes


# -- floors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_churn_of_one_tenant_reloads_nothing_of_another(policy: str) -> None:
    world = World(max_loras=8, adapter_host_memory=160, adapter_eviction=policy, adapter_tenant_floor=0.5)
    warm = [of("warm", f"warm{number}") for number in range(2)]
    for number, ref in enumerate(warm):
        world.add(f"w{number}", [number], ref)
        world.run()
    for number in range(60):
        world.add(f"c{number}", [number % 500], of("churner", f"cold{number}"))
        world.run()
    loads = world.engine.stats().adapters
    for number, ref in enumerate(warm):
        world.add(f"again{number}", [number], ref)
    world.run()
    world.check_answers()
    again = world.engine.stats().adapters
    for ref in warm:
        assert ref.digest in world.residency.slots
        assert again[ref.digest].loads == loads[ref.digest].loads == 1
        assert again[ref.digest].evictions == 0


def test_storm_of_waiting_requests_stays_within_what_floors_leave_it() -> None:
    world = World(max_loras=8, adapter_host_memory=100, adapter_tenant_floor=0.5, auto_load=False)
    for number in range(2):
        world.add(f"w{number}", [number], of("warm", f"warm{number}"))
        world.step()
        world.finish_load(of("warm", f"warm{number}"))
        world.run()
    for number in range(40):
        world.add(f"c{number}", [number], of("churner", f"cold{number}"), max_tokens=2)
    world.step()
    assert sum(ref.num_bytes for ref in world.loading) <= 80, "more is under way than may come"
    while world.loading:
        world.finish_load(world.loading[0])
        world.step()
    world.run()
    assert {"sha256:warm0", "sha256:warm1"} <= set(world.residency.host.digests)
    world.check_answers()
    assert len(world.ends) == 42


def test_what_waits_for_its_first_use_stays_in_host_memory_and_what_nobody_wants_goes() -> None:
    world = World(max_loras=1, adapter_host_memory=30, adapter_eviction="lru", auto_load=False)
    for name in ("runs", "waits"):
        world.add(name, [1], adapter(name), max_tokens=30)
        world.step()
        world.finish_load(adapter(name))
        world.step()
    for name in ("idle", "new"):
        world.command(Prefetch(adapter(name)))
        world.finish_load(adapter(name))
    assert set(world.residency.host.digests) == {"sha256:runs", "sha256:waits", "sha256:new"}


# -- why they left -----------------------------------------------------------------------------------------------


def test_evictions_are_told_by_reason_in_tiers_and_per_adapter() -> None:
    world = World(max_loras=1)
    for name in "ab":
        world.add(name, [1], adapter(name))
        world.run()
    world.command(Evict("sha256:b"))
    world.add("c", [1], adapter("c"))
    world.run()
    world.command(Evict("sha256:c", forget=True))
    stats = world.engine.stats()
    device, host = stats.tiers["device"], stats.tiers["host"]
    assert device.eviction_reasons == {"capacity": 1, "admin": 1, "deleted": 1}
    assert host.eviction_reasons == {"admin": 1, "deleted": 1}
    assert (device.evictions, host.evictions) == (3, 2)
    counters = stats.adapters["sha256:a"], stats.adapters["sha256:b"]
    assert [(own.evictions, own.eviction_reasons, own.last_eviction) for own in counters] == [
        (1, {"capacity": 1}, "capacity"),
        (1, {"admin": 1}, "admin"),
    ]
    assert (device.num_items, host.num_items) == (0, 1)
