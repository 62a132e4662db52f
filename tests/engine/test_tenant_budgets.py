"""A tenant's bytes on the device: at most so many, and so many for sure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, DeviceQuotaError, LoraServeError
from lora_serve.core.figures import EvictionReason
from lora_serve.core.messages import ErrorEvent, Resize, SetTenantBudgets
from lora_serve.core.tenant import TenantBudget
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.slots import SlotTable
from tests.engine.world import World, adapter


def of(tenant: str, name: str, num_bytes: int = 10) -> AdapterRef:
    return replace(adapter(name, num_bytes), tenant=tenant)


def limited(world: World, *budgets: TenantBudget) -> None:
    assert world.command(SetTenantBudgets(budgets)) == [None]


def on_device(world: World) -> set[str]:
    return {info.name for info in world.engine.residency.slots.infos()}


def test_tenant_at_its_maximum_evicts_its_own_while_others_stay() -> None:
    world = World(max_loras=8)
    limited(world, TenantBudget("acme", at_most=20))
    world.add("other", [1], of("globex", "g"))
    for number in range(6):
        world.add(f"r{number}", [number], of("acme", f"a{number}"))
    world.run()
    world.check_answers()
    assert "g" in on_device(world)
    assert len(on_device(world) - {"g"}) == 2
    world.check_nothing_held()


def test_rows_of_a_tenant_at_its_maximum_wait_for_its_own_and_take_no_row_of_others() -> None:
    world = World(max_loras=2, max_num_seqs=4, policy="fair")
    limited(world, TenantBudget("acme", at_most=10))
    world.add("long", [1], of("acme", "a1"), max_tokens=20)
    world.add("other", [2], of("globex", "g"), max_tokens=20)
    world.step()
    world.add("next", [3], of("acme", "a2"), max_tokens=2)
    for _ in range(10):
        world.step()
        assert on_device(world) == {"a1", "g"}
    assert world.engine.stats().num_preemptions == 0
    world.run()
    world.check_answers()
    assert on_device(world) == {"a2", "g"}


def test_request_for_more_than_its_owner_may_have_is_told_so() -> None:
    world = World()
    limited(world, TenantBudget("acme", at_most=5))
    world.add("large", [1], of("acme", "a"))
    world.add("other", [1], of("globex", "g"))
    world.run()
    end = world.ends["large"]
    assert isinstance(end, ErrorEvent)
    assert isinstance(end.error, DeviceQuotaError)
    assert not isinstance(world.ends["other"], ErrorEvent)


def test_guaranteed_adapters_outlast_the_churn_of_others() -> None:
    world = World(max_loras=3)
    limited(world, TenantBudget("acme", guaranteed=20))
    for name in ("a1", "a2"):
        world.add(name, [1], of("acme", name))
    world.run()
    for number in range(8):
        world.add(f"r{number}", [number], of("globex", f"g{number}"))
    world.run()
    world.check_answers()
    assert {"a1", "a2"} < on_device(world)


def test_what_can_never_stand_beside_a_guarantee_is_refused_instead_of_waiting_for_ever() -> None:
    slots = SlotTable(8, max_bytes=30)
    slots.set_budgets((TenantBudget("acme", guaranteed=20),))
    for name in ("a1", "a2"):
        assert slots.place(of("acme", name)) is not None
    slots.check_possible([of("globex", "g")])
    with pytest.raises(AdapterUnavailableError, match="guaranteed to others"):
        slots.check_possible([of("globex", "g", 20)])
    slots.check_possible([of("acme", "a3", 20)])


def test_lower_maximum_takes_unused_adapters_off_the_device_at_once() -> None:
    world = World(max_loras=8)
    for name in ("a1", "a2", "a3"):
        world.add(name, [1], of("acme", name))
    world.add("g", [1], of("globex", "g"))
    world.run()
    world.add("again", [1], of("acme", "a1"))  # now a2 is the longest unused
    world.run()
    limited(world, TenantBudget("acme", at_most=20))
    assert on_device(world) == {"a1", "a3", "g"}
    limited(world, TenantBudget("acme", at_most=0))
    assert on_device(world) == {"g"}
    assert set(world.runner.slots) == {info.index for info in world.engine.residency.slots.infos()}
    assert world.engine.stats().tiers["device"].eviction_reasons == {EvictionReason.SHRUNK: 3}
    assert world.engine.stats().host_digests  # fetched bytes are no device bytes


def test_adapters_in_use_leave_with_their_last_row_and_come_back_as_far_as_the_maximum_goes() -> None:
    world = World(max_loras=8, max_num_seqs=8)
    for name in ("a1", "a2"):
        world.add(name, [1], of("acme", name), max_tokens=6)
    for _ in range(3):
        world.step()
    assert world.engine.stats().num_running == 2
    limited(world, TenantBudget("acme", at_most=10))
    assert on_device(world) == {"a1", "a2"}
    for name in ("a1", "a2"):
        world.add(f"late-{name}", [1], of("acme", name), max_tokens=2)
    world.run()
    world.check_answers()
    assert len(on_device(world)) == 1
    world.check_nothing_held()


def test_pinned_adapters_stay_beyond_a_lower_maximum_until_they_are_unpinned() -> None:
    slots = SlotTable(8)
    for name in ("a1", "a2"):
        assert slots.place(of("acme", name)) is not None
    slots.set_pinned(adapter("a1").digest, True)
    (gone,) = slots.set_budgets((TenantBudget("acme", at_most=5),))
    assert gone.digest == adapter("a2").digest
    (gone,) = slots.set_pinned(adapter("a1").digest, False)
    assert gone.digest == adapter("a1").digest


def test_maximum_that_is_raised_again_keeps_what_was_to_leave() -> None:
    slots, digest = SlotTable(8), adapter("a1").digest
    assert slots.place(of("acme", "a1")) is not None
    slot = slots.acquire(digest)
    assert slots.set_budgets((TenantBudget("acme", at_most=5),)) == ()
    assert slots.is_leaving(digest)
    assert slots.set_budgets(()) == ()
    assert not slots.is_leaving(digest)
    assert not slots.release(slot)
    assert slots.has_free(of("acme", "a4"))


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 12), st.sampled_from(["idle", "used", "pinned"]))),
    st.integers(0, 40),
)
def test_after_a_new_maximum_no_more_stays_than_it_allows_and_others_lose_nothing(
    placed: list[tuple[str, int, str]], at_most: int
) -> None:
    slots, held = SlotTable(64), []
    refs = [of(tenant, f"{number}", num_bytes) for number, (tenant, num_bytes, _) in enumerate(placed)][:60]
    for ref, (_, _, state) in zip(refs, placed, strict=False):
        assert slots.place(ref) is not None
        if state == "used":
            held.append(slots.acquire(ref.digest))
        if state == "pinned":
            slots.set_pinned(ref.digest, True)
    slots.set_budgets((TenantBudget("a", at_most=at_most),))
    for slot in held:
        if slots.release(slot):
            slots.remove(slot.digest)
    left = [ref for ref in refs if ref.digest in slots]
    kept = sum(ref.num_bytes for ref in left if ref.tenant == "a")
    pinned = sum(ref.num_bytes for ref in left if ref.tenant == "a" and slots.is_pinned(ref.digest))
    assert kept <= max(at_most, pinned)
    assert [ref for ref in left if ref.tenant == "b"] == [ref for ref in refs if ref.tenant == "b"]
    gone = sum(ref.num_bytes for ref in refs if ref.tenant == "a" and ref.digest not in slots)
    assert gone == 0 or kept + gone > at_most, "somebody went for nothing"


def test_engine_that_is_built_anew_is_told_the_budgets_again() -> None:
    state, budgets = DesiredState(4), SetTenantBudgets((TenantBudget("acme", at_most=10),))
    state.note(Resize(max_loras=2))
    state.note(budgets)
    assert state.limits() == [Resize(max_loras=2), budgets]
    state.note(SetTenantBudgets(()))
    assert state.limits() == [Resize(max_loras=2)]


def test_pinned_adapters_count_against_the_maximum() -> None:
    slots = SlotTable(8)
    slots.set_budgets((TenantBudget("acme", at_most=15),))
    assert slots.place(of("acme", "a1")) is not None
    slots.set_pinned(adapter("a1").digest, True)
    with pytest.raises(LoraServeError, match="pinned adapters hold 10"):
        slots.check_possible([of("acme", "a2")])
