"""Bytes that are guaranteed to a tenant, and those that it may have at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.adapters.eviction import create_policy
from lora_serve.adapters.eviction.residents import Residents
from lora_serve.core.tenant import TenantBudget


def table(*budgets: TenantBudget, max_bytes: int | None = None, max_items: int | None = None) -> Residents:
    residents = Residents(create_policy("lru"), max_bytes, max_items, 0.5)
    residents.set_budgets(budgets)
    return residents


def test_newcomer_of_a_tenant_at_its_maximum_pushes_out_its_own() -> None:
    residents = table(TenantBudget("a", at_most=20), max_bytes=100)
    residents.add("other", "b", 10)
    residents.add("first", "a", 10)
    residents.add("second", "a", 10)
    assert residents.victims("a", 10) == ("first",)
    assert residents.victims("a", 20) == ("first", "second")
    assert residents.victims("b", 10) == ()


def test_tenant_at_its_maximum_waits_if_its_own_are_in_use() -> None:
    residents = table(TenantBudget("a", at_most=20), max_bytes=100)
    residents.add("other", "b", 10)
    residents.add("used", "a", 20)
    assert residents.victims("a", 10, {"used": None, "other": 0}.get) is None
    assert residents.victims("a", 21) is None


def test_own_entries_that_make_room_leave_others_alone() -> None:
    residents = table(TenantBudget("a", at_most=20), max_bytes=30)
    residents.add("other", "b", 10)
    residents.add("own", "a", 20)
    assert residents.victims("a", 20) == ("own",)


def test_what_is_guaranteed_stays_even_if_nothing_else_would_make_room() -> None:
    residents = table(TenantBudget("a", guaranteed=20), max_bytes=30)
    residents.add("kept", "a", 20)
    residents.add("busy", "b", 10)
    held = {"kept": 0, "busy": None}
    assert residents.victims("c", 10, held.get) is None
    assert residents.victims("c", 10) == ("busy",)
    residents.set_budgets(())
    assert residents.victims("c", 10, held.get) == ("kept",)


def test_guarantee_binds_others_only_and_only_up_to_its_bytes() -> None:
    residents = table(TenantBudget("a", guaranteed=10), max_bytes=20)
    residents.add("one", "a", 10)
    residents.add("two", "a", 10)
    assert residents.victims("a", 20) == ("one", "two")
    assert residents.victims("c", 10) == ("one",)
    assert residents.victims("c", 20) is None


def test_shrinking_tier_asks_for_no_guarantee() -> None:
    residents = table(TenantBudget("a", guaranteed=20), max_bytes=20)
    residents.add("kept", "a", 20)
    residents.max_bytes = 10
    assert residents.surplus() == ("kept",)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12)), max_size=60),
    st.integers(0, 15),
    st.integers(5, 30),
    st.integers(1, 6),
)
def test_no_sequence_of_newcomers_breaks_a_budget(
    newcomers: list[tuple[str, int]], guaranteed: int, at_most: int, max_items: int
) -> None:
    budgets = (TenantBudget("a", guaranteed=guaranteed), TenantBudget("b", at_most=at_most))
    residents = table(*budgets, max_bytes=40, max_items=max_items)
    held: dict[str, tuple[str, int]] = {}
    for number, (tenant, num_bytes) in enumerate(newcomers):
        before = sum(size for owner, size in held.values() if owner == "a")
        victims = residents.victims(tenant, num_bytes)
        for victim in victims or ():
            residents.remove(victim, for_room=True)
            del held[victim]
        if victims is not None:
            residents.add(str(number), tenant, num_bytes)
            held[str(number)] = (tenant, num_bytes)
        sizes = {name: sum(size for owner, size in held.values() if owner == name) for name in "abc"}
        assert sum(sizes.values()) <= 40
        assert len(held) <= max_items
        assert sizes["b"] <= at_most
        assert tenant == "a" or sizes["a"] >= min(before, guaranteed)
