"""Virtual time over the real engine: what can be worked out by hand comes out, nothing is lost, chance is seeded."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lora_serve.core.setting_types import names_in
from lora_serve.simulate.fleet import SimulatedFleet, StalledError
from lora_serve.simulate.replica import Replica
from tests.simulate.small_fleet import outcomes, rows, run, scenario

MIXED = rows((50, 4), (3, 20), (90, 2), (17, 9), (33, 6))


def test_first_token_of_a_cold_request_is_load_copy_and_chunks_of_its_prompt() -> None:
    config = scenario(1)
    (arrival,) = config.arrivals(rows((50, 3)))
    fleet = run(config, [replace(arrival, time=1.0)])
    (outcome,) = outcomes(fleet)
    load, copy, chunks = 0.1, 0.002, (0.01 + 0.032) + (0.01 + 0.018)
    assert outcome.first_token == pytest.approx(1.0 + load + copy + chunks)
    assert outcome.end == pytest.approx(outcome.first_token + 2 * 0.011)
    assert list(fleet.recorder.gaps) == pytest.approx([0.011, 0.011])


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    config = scenario(2, num_adapters=1)
    first, second = config.arrivals(rows((20, 2)))
    first, second = replace(first, time=0.0), replace(second, time=0.11)
    found = outcomes(run(config, [first, second]))
    end_of_step = 0.1 + 0.002 + 0.01 + 0.02
    assert found[0].first_token == pytest.approx(end_of_step)
    assert found[1].first_token == pytest.approx(end_of_step + 0.01 + 0.001 * (1 + 20))


def test_an_adapter_pushed_out_of_host_memory_comes_back_from_the_local_disk() -> None:
    config = scenario(3, num_adapters=2, host_bytes=100, max_loras=1)
    first, second, third = config.arrivals(rows((4, 1), every=1.0))
    other = next(
        arrival.adapter
        for arrival in scenario(50, num_adapters=2).arrivals(rows((4, 1)))
        if arrival.adapter != first.adapter
    )
    arrivals = [first, replace(second, adapter=other), replace(third, adapter=first.adapter)]
    fleet = run(config, arrivals)
    waits = [outcome.first_token - outcome.arrival for outcome in outcomes(fleet)]
    assert waits == pytest.approx([0.116, 0.116, 0.066])
    assert fleet.replicas[0].loader.num_remote == 2


@pytest.mark.crossed
@pytest.mark.parametrize("router", names_in("routing/routers"))
@pytest.mark.parametrize("policy", names_in("engine/policies"))
def test_every_request_ends_once_with_all_its_tokens(policy: str, router: str) -> None:
    config = scenario(120, num_replicas=3, rate=60.0)
    arrivals = config.arrivals(MIXED)
    fleet = run(config, arrivals, policy, router)
    assert [outcome.index for outcome in outcomes(fleet)] == list(range(120))
    assert [outcome.num_output for outcome in outcomes(fleet)] == [arrival.num_output for arrival in arrivals]
    assert not [outcome for outcome in outcomes(fleet) if outcome.error]
    assert sum(fleet.num_sent) == 120
    for replica in fleet.replicas:
        scheduler = replica.engine.scheduler
        assert not scheduler.waiting
        assert not scheduler.running


def test_requests_that_are_refused_are_counted_as_failed() -> None:
    config = scenario(40, rate=1000.0, max_queue=5)
    summary = config.run(config.arrivals(MIXED), "fcfs", "hash")
    assert summary.num_requests == 40
    assert summary.num_failed > 0
    assert summary.errors == {"QueueFullError": summary.num_failed}


def test_deadlines_pass_in_virtual_time() -> None:
    config = scenario(40, rate=1000.0, timeout=0.3)
    fleet = run(config, config.arrivals(MIXED))
    late = [outcome for outcome in outcomes(fleet) if outcome.error == "RequestTimeoutError"]
    assert late
    assert all(outcome.end >= outcome.arrival + 0.3 for outcome in late)


def test_the_same_seed_gives_the_same_figures_and_another_does_not() -> None:
    def figures(seed: int) -> object:
        config = scenario(80, num_replicas=2, rate=40.0, seed=seed)
        return config.run(config.arrivals(MIXED), "fcfs", "affinity")

    assert figures(3) == figures(3)
    assert figures(3) != figures(4)


def test_no_clock_of_the_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = scenario(30, num_replicas=2, rate=40.0)
    arrivals = config.arrivals(MIXED)

    def forbidden() -> float:
        raise AssertionError("the machine's time was read")

    with monkeypatch.context() as patched:
        for name in ("monotonic", "perf_counter", "time"):
            patched.setattr(time, name, forbidden)
        fleet = run(config, arrivals)
    assert len(outcomes(fleet)) == 30
    assert {replica.engine._clock for replica in fleet.replicas} == {replica._clock for replica in fleet.replicas}
    assert fleet.replicas[0].engine.residency._clock is fleet.replicas[0]._clock


def test_the_rate_scales_the_traces_times() -> None:
    slow, fast = (scenario(20, rate=rate) for rate in (1.0, 2.0))
    ends = [max(outcome.end for outcome in outcomes(run(one, one.arrivals(rows((4, 1)))))) for one in (slow, fast)]
    assert ends[0] > 1.9 * ends[1]


def test_requests_that_never_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = scenario(2)
    monkeypatch.setattr(Replica, "post", lambda self, message: None)
    with pytest.raises(StalledError, match="2 of 2 requests never end, the first is 0"):
        SimulatedFleet(config.profile, config.engine_config("fcfs"), "hash", 1).run(config.arrivals(rows((4, 1))))


def test_a_fleet_serves_more_than_one_replica() -> None:
    one, four = (scenario(200, num_replicas=count, rate=100.0) for count in (1, 4))
    throughputs = [each.run(each.arrivals(MIXED), "fcfs", "least_loaded").output_tokens_per_s for each in (one, four)]
    assert throughputs[1] > 2 * throughputs[0]
