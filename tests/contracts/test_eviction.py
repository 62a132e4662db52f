"""What every eviction policy must do; each policy inherits the class."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lora_serve.adapters.eviction as package
from lora_serve.adapters.eviction import EvictionPolicy, create_policy

OPERATIONS = st.lists(st.tuples(st.sampled_from(["add", "use", "remove", "evict"]), st.sampled_from("abcdefgh")))


class EvictionContract(ABC):
    name: str

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return create_policy(self.name)

    @abstractmethod
    def test_is_the_file_of_its_name(self) -> None: ...

    def test_order_is_empty_at_first(self, policy: EvictionPolicy) -> None:
        assert list(policy.order()) == []

    def test_among_equals_the_least_recently_used_goes_first(self, policy: EvictionPolicy) -> None:
        for key in "abc":
            policy.add(key, 10, 1.0)
        assert list(policy.order()) == ["a", "b", "c"]
        policy.use("a")
        assert list(policy.order()) == ["b", "c", "a"]

    def test_reading_the_order_changes_nothing(self, policy: EvictionPolicy) -> None:
        for key in "abc":
            policy.add(key, 10, 1.0)
        next(policy.order())
        assert list(policy.order()) == list(policy.order()) == ["a", "b", "c"]

    def test_key_that_came_back_is_new(self, policy: EvictionPolicy) -> None:
        policy.add("a", 10, 1.0)
        for _ in range(50):
            policy.use("a")
        policy.remove("a")
        policy.add("b", 10, 1.0)
        policy.add("a", 10, 1.0)
        assert list(policy.order()) == ["b", "a"]

    def test_what_was_hot_long_ago_goes_before_what_is_used_now(self, policy: EvictionPolicy) -> None:
        policy.add("old", 10, 1.0)
        for _ in range(20):
            policy.use("old")
        for number in range(200):
            policy.add(f"new{number}", 10, 1.0)
            if number >= 3:
                policy.evict(next(policy.order()))
        assert "old" not in set(policy.order())

    def test_unknown_seconds_and_no_bytes_are_taken(self, policy: EvictionPolicy) -> None:
        policy.add("a", 0, 0.0)
        policy.add("b", 10, 0.0)
        assert set(policy.order()) == {"a", "b"}

    def test_ten_thousand_entries_are_no_burden(self, policy: EvictionPolicy) -> None:
        for number in range(10_000):
            policy.add(f"k{number}", 10 + number % 7, 0.1)
        started = time.process_time()
        for number in range(1000):
            policy.use(f"k{9_999 - number}")
            policy.evict(next(policy.order()))
        assert time.process_time() - started < 2.0, "more than 2 ms for a use and an eviction"


class TestLru(EvictionContract):
    name = "lru"

    def test_is_the_file_of_its_name(self) -> None:
        assert type(create_policy("lru")).__module__.endswith(".eviction.lru")

    def test_size_and_cost_do_not_count(self) -> None:
        policy = create_policy("lru")
        policy.add("dear", 1, 100.0)
        policy.add("cheap", 1000, 0.001)
        assert list(policy.order()) == ["dear", "cheap"]


class TestCost(EvictionContract):
    name = "cost"

    def test_is_the_file_of_its_name(self) -> None:
        assert type(create_policy("cost")).__module__.endswith(".eviction.cost")

    def test_cheap_to_reload_goes_first(self) -> None:
        policy = create_policy("cost")
        policy.add("dear", 10, 5.0)
        policy.add("cheap", 10, 0.1)
        assert list(policy.order()) == ["cheap", "dear"]

    def test_large_goes_first_at_equal_cost(self) -> None:
        policy = create_policy("cost")
        policy.add("small", 10, 1.0)
        policy.add("large", 1000, 1.0)
        assert list(policy.order()) == ["large", "small"]

    def test_rare_goes_before_frequent_even_if_used_last(self) -> None:
        policy = create_policy("cost")
        policy.add("frequent", 10, 1.0)
        for _ in range(5):
            policy.use("frequent")
        policy.add("rare", 10, 1.0)
        assert list(policy.order()) == ["rare", "frequent"]

    def test_clock_rises_to_the_evicted_priority(self) -> None:
        """Priorities by hand: a = 0 + 3 * 10 / 10 = 3, b = 0 + 10 / 10 = 1; b leaves, so c = 1 + 15 / 10 = 2.5; c
        leaves, so d = 2.5 + 10 / 10 = 3.5, behind a.
        """
        policy = create_policy("cost")
        policy.add("a", 10, 10.0)
        policy.use("a")
        policy.use("a")
        policy.add("b", 10, 10.0)
        policy.evict("b")
        policy.add("c", 10, 15.0)
        assert list(policy.order()) == ["c", "a"]
        policy.evict("c")
        policy.add("d", 10, 10.0)
        assert list(policy.order()) == ["a", "d"]

    def test_removal_for_another_reason_does_not_age_the_others(self) -> None:
        policy = create_policy("cost")
        policy.add("a", 10, 10.0)
        policy.add("b", 10, 50.0)
        policy.remove("b")
        policy.use("a")
        policy.add("c", 10, 15.0)
        assert list(policy.order()) == ["c", "a"], "the clock must still be at zero"


def test_every_policy_has_its_contract() -> None:
    files = {path.stem for path in Path(package.__file__).parent.glob("*.py")}
    assert files - {"__init__", "base", "residents", "victim_choice"} == {"lru", "cost"}


@pytest.mark.parametrize("name", ["lru", "cost"])
@given(operations=OPERATIONS)
def test_orders_exactly_what_is_here(name: str, operations: list[tuple[str, str]]) -> None:
    policy, here = create_policy(name), set[str]()
    for operation, key in operations:
        if operation == "add" and key not in here:
            policy.add(key, ord(key), 1.0)
            here.add(key)
        elif operation != "add" and key in here:
            getattr(policy, operation)(key)
            here -= set() if operation == "use" else {key}
        order = list(policy.order())
        assert len(order) == len(here)
        assert set(order) == here
