"""What each router costs on Zipf popularity over a fleet, and what a gateway may know there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from lora_serve.routing.fleet_view import Tier
from lora_serve.simulate.fleet import Gateway, SimulatedFleet, Summary
from tests.simulate.small_fleet import outcomes, rows, scenario

LENGTHS = rows((40, 6), (10, 3), (70, 4))


@cache
def figures(router: str, zipf: float = 0.9, rate: float = 40.0, **fields: int) -> Summary:
    """Host memory of 8 adapters on each of 6 replicas: all 40 fit in if none is there twice."""
    config = scenario(400, num_replicas=6, num_adapters=40, zipf=zipf, rate=rate, host_bytes=800, **fields)
    return config.run(config.arrivals(LENGTHS), "fcfs", router)


def test_affinity_loads_a_third_of_what_two_choices_loads() -> None:
    aware, unaware = figures("affinity"), figures("two_choices")
    assert aware.host_loads_per_1000 < unaware.host_loads_per_1000 / 3
    assert aware.slot_hit_rate > unaware.slot_hit_rate + 0.1
    assert aware.ttft["p95"] <= unaware.ttft["p95"]


@pytest.mark.nightly
def test_two_gateways_that_do_not_know_each_other_load_little_more() -> None:
    one, two = figures("affinity"), figures("affinity", num_gateways=2)
    assert two.host_loads_per_1000 < figures("two_choices", num_gateways=2).host_loads_per_1000 / 3
    assert two.ttft["p95"] < 1.2 * one.ttft["p95"]


@pytest.mark.nightly
def test_under_skew_a_bound_keeps_hashs_tail_low_for_few_loads_more() -> None:
    aware, by_hash = figures("affinity", zipf=1.5), figures("hash", zipf=1.5)
    assert aware.ttft["p95"] < by_hash.ttft["p95"] / 5
    assert aware.busiest_replica < by_hash.busiest_replica
    assert by_hash.host_loads_per_1000 <= aware.host_loads_per_1000 < 1.2 * by_hash.host_loads_per_1000


def test_loads_of_the_warm_up_are_not_counted() -> None:
    config = scenario(100, num_adapters=2)
    arrivals = config.arrivals(LENGTHS)
    cold, warm = (replace(config, warm_share=share).run(arrivals, "fcfs", "hash") for share in (0.0, 0.5))
    assert (cold.host_loads_per_1000, warm.host_loads_per_1000) == (20.0, 0.0)


def test_gateway_knows_another_gateways_adapters_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    config = scenario(4, num_adapters=1, num_gateways=2)
    digest = config.arrivals(LENGTHS)[0].adapter.digest
    times = (0.1, 0.9, 1.05, 1.95)  # by gateways 0, 1, 0, 1; the replica reports at 0 and 1
    arrivals = [replace(a, time=time) for a, time in zip(config.arrivals(LENGTHS), times, strict=True)]
    seen: list[tuple[Tier, int]] = []
    choose = Gateway.choose

    def watched(gateway: Gateway, request: object) -> str:
        (state,) = gateway.view.replicas
        seen.append((state.tier([digest]), state.num_requests))
        return choose(gateway, request)

    monkeypatch.setattr(Gateway, "choose", watched)
    fleet = SimulatedFleet(config.profile, config.engine_config("fcfs"), "affinity", 1, num_gateways=2)
    fleet.run(arrivals)
    assert [outcome.error for outcome in outcomes(fleet)] == [None] * 4
    assert [tier for tier, _ in seen] == [Tier.NONE, Tier.NONE, Tier.DEVICE, Tier.DEVICE]
