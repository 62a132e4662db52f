"""Budgets and tenants' floors of one tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.adapters.eviction import create_policy
from lora_serve.adapters.eviction.residents import Residents


def table(max_bytes: int | None = None, max_items: int | None = None, floor: float = 0.0) -> Residents:
    return Residents(create_policy("lru"), max_bytes, max_items, floor)


def admit(residents: Residents, key: str, tenant: str, num_bytes: int) -> tuple[str, ...]:
    victims = residents.victims(tenant, num_bytes)
    assert victims is not None
    for victim in victims:
        residents.remove(victim, for_room=True)
    residents.add(key, tenant, num_bytes)
    return victims


def test_only_as_many_go_as_make_room() -> None:
    residents = table(max_bytes=30)
    for key in "abc":
        residents.add(key, "t", 10)
    assert residents.victims("t", 15) == ("a", "b")
    assert residents.victims("t", 31) is None


def test_small_ones_are_spared_when_a_large_one_goes_anyway() -> None:
    residents = table(max_bytes=12)
    residents.add("small", "t", 1)
    residents.add("large", "t", 10)
    assert residents.victims("t", 9) == ("large",)


def test_items_are_limited_beside_bytes() -> None:
    residents = table(max_bytes=100, max_items=2)
    residents.add("a", "t", 1)
    residents.add("b", "t", 1)
    assert residents.victims("t", 1) == ("a",)


def test_what_may_never_go_stays_and_what_is_wanted_goes_late() -> None:
    residents = table(max_items=3)
    for key in ("used", "favoured", "wanted"):
        residents.add(key, "t", 1)
    levels: dict[str, int | None] = {"used": None, "favoured": 2, "wanted": 1}
    assert residents.victims("t", 1, levels.get) == ("wanted",)
    levels["wanted"] = None
    assert residents.victims("t", 1, levels.get) == ("favoured",)
    levels["favoured"] = None
    assert residents.victims("t", 1, levels.get) is None


def test_churn_of_one_tenant_takes_its_own_entries_once_the_other_is_at_its_floor() -> None:
    residents = table(max_bytes=100, floor=0.5)
    for number in range(10):
        admit(residents, f"warm{number}", "warm", 10)
    for number in range(200):
        admit(residents, f"cold{number}", "churner", 10)
    warm = [key for key in residents if key.startswith("warm")]
    assert len(warm) == 3, "a quarter of 100 bytes is kept; 30 is the least that is not below it"


def test_without_floors_the_same_churn_flushes_everybody() -> None:
    residents = table(max_bytes=100)
    admit(residents, "warm", "warm", 10)
    for number in range(20):
        admit(residents, f"cold{number}", "churner", 10)
    assert "warm" not in residents


def test_own_entries_below_the_floor_go_for_an_own_newcomer() -> None:
    residents = table(max_items=4, floor=1.0)
    for key, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        residents.add(key, tenant, 1)
    assert residents.victims("b", 1) == ("b1",)


def test_floors_are_in_the_unit_that_is_short() -> None:
    """Few bytes of many: in bytes everyone is below its floor, and items are what is short."""
    residents = table(max_bytes=10**9, max_items=4, floor=0.5)
    for key, tenant in (("only", "warm"), ("many1", "hog"), ("many2", "hog"), ("many3", "hog")):
        residents.add(key, tenant, 1)
    assert residents.victims("third", 1) == ("many1",)


def test_entry_that_crosses_its_tenants_floor_goes_before_one_that_is_below() -> None:
    residents = table(max_bytes=100, floor=0.5)
    residents.add("small", "a", 10)  # each floor is 100 / 3 / 2
    residents.add("large", "b", 80)
    assert residents.victims("c", 50) == ("large",)


def test_newcomer_that_fits_only_without_floors_gets_in_all_the_same() -> None:
    residents = table(max_bytes=100, floor=1.0)
    residents.add("a", "a", 40)
    assert residents.victims("b", 90) == ("a",)


def test_surplus_after_shrinking_is_as_much_as_may_go() -> None:
    residents = table(max_items=4)
    for key in "abcd":
        residents.add(key, "t", 1)
    residents.max_items = 1
    assert residents.surplus() == ("a", "b", "c")
    assert residents.surplus(lambda key: None if key in "ab" else 0) == ("c", "d")


def test_protected_is_what_floors_of_others_keep() -> None:
    residents = table(max_bytes=100, max_items=10, floor=0.5)
    for number in range(6):
        residents.add(f"a{number}", "a", 10)
    kept = residents.protected("b", besides=())
    assert (kept.num_bytes, kept.num_items) == (25, 2)
    kept = residents.protected("b", besides={"a0", "a1"})
    assert (kept.num_bytes, kept.num_items) == (5, 0), "what is counted elsewhere is not counted twice"
    assert residents.protected("a", besides=()).num_bytes == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["one", "two", "three"]), st.integers(0, 8), st.integers(1, 40)), max_size=80
)


@given(
    STEPS,
    st.sampled_from(["lru", "cost"]),
    st.floats(0.0, 1.0),
    st.integers(1, 3),
    st.sets(st.integers(0, 60), max_size=4),
)
def test_tenant_below_its_floor_never_loses_an_entry_to_others(
    steps: list[tuple[str, int, int]], policy: str, floor: float, num_warm: int, used: set[int]
) -> None:
    """Any churn whose newcomers fit beside the floors; the budget holds, and what is in use stays."""
    budget = 400
    warm_bytes = int(budget / 4 * floor)  # of the share of four tenants
    residents = Residents(create_policy(policy), budget, None, floor)
    warm = {f"warm{number}": warm_bytes // num_warm for number in range(num_warm)}
    for key, num_bytes in warm.items():
        residents.add(key, "warm", num_bytes, 1.0)
    in_use: dict[str, int] = {}
    for number, (tenant, index, num_bytes) in enumerate(steps):
        key = f"{tenant}-{index}"
        if key in residents:
            residents.use(key)
            continue
        victims = residents.victims(tenant, num_bytes, lambda key: None if key in in_use else 0)
        if victims is None:
            assert sum(in_use.values()) + num_bytes + sum(warm.values()) > budget, "there was room to make"
            continue
        assert not set(victims) & set(in_use), "what was in use was evicted"
        for victim in victims:
            residents.remove(victim, for_room=True)
        residents.add(key, tenant, num_bytes, 0.5)
        if number in used and sum(in_use.values()) + num_bytes <= (budget - sum(warm.values())) / 4:
            in_use[key] = num_bytes
        assert residents.num_bytes <= budget
        assert all(key in residents for key in warm), "the churn of others took what was below the floor"


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_equal_tenants_under_equal_churn_end_with_equal_parts(policy: str) -> None:
    residents = Residents(create_policy(policy), 100, None, 1.0)
    for number in range(400):
        tenant = f"t{number % 4}"
        for victim in residents.victims(tenant, 5) or ():
            residents.remove(victim, for_room=True)
        residents.add(f"{tenant}-{number}", tenant, 5, 0.1)
    parts = {tenant: sum(key.startswith(tenant) for key in residents) for tenant in ("t0", "t1", "t2", "t3")}
    assert set(parts.values()) == {5}
