"""Each router's promise, and what it costs, on Zipf popularity over a fleet."""

from __future__ import annotations

from lora_serve.simulate.routers import create_router, router_names
from lora_serve.simulate.scenario import Summary
from tests.simulate.small_fleet import rows, scenario

LENGTHS = rows((40, 6), (10, 3), (70, 4))


def nowhere(replica: int, digest: str) -> bool:
    return False


def figures(router: str, zipf: float = 0.9, rate: float = 40.0) -> Summary:
    config = scenario(600, num_replicas=6, num_adapters=40, zipf=zipf, rate=rate)
    return config.run(config.arrivals(LENGTHS), "fcfs", router)


def test_the_three_routers_are_found() -> None:
    assert router_names() == ["affinity", "hash", "least_loaded"]


def test_hash_sends_an_adapter_to_one_replica_whatever_its_load() -> None:
    router = create_router("hash", 8)
    homes = {router.choose("a", loads, nowhere) for loads in ([0] * 8, [9, 0, 9, 0, 9, 0, 9, 0], list(range(8)))}
    assert len(homes) == 1


def test_hash_uses_all_replicas_and_moves_few_adapters_when_one_is_added() -> None:
    digests = [f"sha256:{index}" for index in range(400)]
    eight, nine = create_router("hash", 8), create_router("hash", 9)
    before = [eight.choose(digest, [0] * 8, nowhere) for digest in digests]
    after = [nine.choose(digest, [0] * 9, nowhere) for digest in digests]
    assert set(before) == set(range(8))
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {8}


def test_least_loaded_takes_the_replica_with_the_fewest_requests_and_equals_in_turn() -> None:
    router = create_router("least_loaded", 3)
    assert router.choose("a", [2, 1, 2], nowhere) == 1
    assert {router.choose("a", [1, 1, 1], nowhere) for _ in range(3)} == {0, 1, 2}


def test_affinity_prefers_who_holds_the_adapter_until_it_is_over_the_bound() -> None:
    router = create_router("affinity", 4)

    def holds(replica: int, digest: str) -> bool:
        return replica == 2

    assert router.choose("a", [1, 1, 1, 1], holds) == 2
    assert router.choose("a", [0, 0, 9, 0], holds) != 2


def test_affinity_without_a_holder_keeps_to_the_adapters_own_order() -> None:
    router = create_router("affinity", 4)
    first = router.choose("a", [0] * 4, nowhere)
    second = router.choose("a", [9 * (replica == first) for replica in range(4)], nowhere)
    assert {router.choose("a", [0] * 4, nowhere) for _ in range(5)} == {first}
    assert second != first


def test_affinity_finds_more_adapters_in_slots_than_least_loaded() -> None:
    assert figures("affinity").slot_hit_rate > figures("least_loaded").slot_hit_rate + 0.1
    assert figures("affinity").num_host_loads < figures("least_loaded").num_host_loads


def test_under_skew_least_loaded_has_a_lower_tail_than_hash() -> None:
    by_hash, least_loaded = figures("hash", zipf=1.5), figures("least_loaded", zipf=1.5)
    assert least_loaded.ttft["p99"] < by_hash.ttft["p99"]
    assert least_loaded.busiest_replica < by_hash.busiest_replica
