from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.engine.host_cache import HostCache


def test_least_recently_used_goes_first() -> None:
    cache = HostCache[str](max_bytes=30)
    for digest in "abc":
        assert cache.put(digest, digest.upper(), 10) == ()
    assert cache.get("a") == "A"
    assert cache.put("d", "D", 20) == ("b", "c")
    assert set(cache.digests) == {"a", "d"}
    assert cache.get("b") is None


def test_number_of_items_is_limited_too() -> None:
    cache = HostCache[int](max_bytes=100, max_items=2)
    assert [cache.put(digest, 0, 1) for digest in "abc"] == [(), (), ("a",)]


def test_item_larger_than_the_budget_is_refused_and_evicts_nothing() -> None:
    cache = HostCache[int](max_bytes=10)
    cache.put("a", 1, 10)
    with pytest.raises(AdapterUnavailableError, match="--adapter-host-memory allows 10"):
        cache.put("b", 2, 11)
    assert cache.digests == ("a",)


def test_asking_whether_it_is_here_is_not_a_use() -> None:
    cache = HostCache[int](max_bytes=2)
    cache.put("a", 1, 1)
    cache.put("b", 1, 1)
    assert "a" in cache
    assert cache.put("c", 1, 1) == ("a",)


def test_drop_frees_the_bytes() -> None:
    cache = HostCache[int](max_bytes=10)
    cache.put("a", 1, 7)
    assert cache.drop("a")
    assert not cache.drop("a")
    assert (cache.num_bytes, len(cache)) == (0, 0)


def fits(model: list[tuple[str, int]], gone: list[tuple[str, int]], size: int, budget: int, items: int) -> bool:
    left = [item for item in model if item not in gone]
    return size + sum(size for _, size in left) <= budget and len(left) < items


OPERATIONS = st.tuples(st.sampled_from(["put", "get", "drop"]), st.sampled_from("abcdef"), st.integers(0, 6))


@given(st.lists(OPERATIONS, max_size=60), st.integers(6, 15), st.integers(1, 4))
def test_behaves_like_a_plain_list_of_uses(operations: list[tuple[str, str, int]], budget: int, items: int) -> None:
    cache = HostCache[int](budget, items)
    model: list[tuple[str, int]] = []  # oldest use first
    for operation, digest, size in operations:
        old = [item for item in model if item[0] == digest]
        rest = [item for item in model if item[0] != digest]
        if operation == "put":
            evicted = []
            while not fits(rest, evicted, size, budget, items):
                evicted.append(next(item for item in rest if item not in evicted))
            for item in evicted[-2::-1]:  # a late large one may have made earlier ones' going needless
                if fits(rest, [other for other in evicted if other != item], size, budget, items):
                    evicted.remove(item)
            assert cache.put(digest, size, size) == tuple(name for name, _ in evicted)
            model = [item for item in rest if item not in evicted] + [(digest, size)]
        elif operation == "get":
            model = [*rest, *old]
            assert cache.get(digest) == (old[0][1] if old else None)
        else:
            model = rest
            assert cache.drop(digest) == bool(old)
        assert set(cache.digests) == {digest for digest, _ in model}
        assert cache.num_bytes == sum(size for _, size in model)
