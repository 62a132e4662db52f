"""Latency targets: kept by themselves while the load doubles and halves, on a machine whose step cost is known."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from lora_serve.core.batch import StepLoad
from lora_serve.core.messages import Tune
from lora_serve.core.setting_groups.engine import BatchLimits
from lora_serve.engine.batcher import reason_of
from lora_serve.engine.step_cost import LatencyController, LatencyWindow, Running, StepCost, StepLimits
from tests.engine.timed_world import Arrival, FastOutputs, p95
from tests.engine.world import batch_limits
from tests.tiers import by_tier

PHASE = by_tier(25.0, 40.0)
PHASES = ((0.0, 1.0), (PHASE, 2.0), (2 * PHASE, 1.0))  # from when on, times the rate
END = 3 * PHASE
SETTLING = 5.0  # seconds after a change of the load that are not counted


def machine(load: StepLoad) -> float:
    """Seconds; a small model on two cores."""
    return 8e-3 + 2.5e-4 * load.num_tokens + 3e-4 * load.num_rows + 1e-6 * load.num_kv_read


class Noisy:
    """The machine, ten percent up and down."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def __call__(self, load: StepLoad) -> float:
        return machine(load) * self._random.lognormvariate(0, 0.05)


def doubling(rate: float, num_prompt: int, num_output: int) -> list[Arrival]:
    """Poisson arrivals at `rate` a second, doubled in the middle phase."""
    generator, arrivals, now = random.Random(1), [], 0.0
    while now < END:
        factor = next(factor for begin, factor in reversed(PHASES) if now >= begin)
        now += generator.expovariate(rate * factor)
        length = generator.randint(num_prompt // 2, num_prompt * 3 // 2)
        arrivals.append(Arrival(now, length, num_output))
    return arrivals


def play(arrivals: list[Arrival], **settings: Any) -> FastOutputs:
    house = FastOutputs(
        Noisy(),
        **{
            "max_num_seqs": 64, "max_num_batched_tokens": 1024, "block_size": 16, "enable_prefix_caching": False,
            **settings,
        },
    )  # fmt: skip
    house.play(arrivals)
    return house


def by_phase(house: FastOutputs, kind: str) -> list[float]:
    """p95 of each phase, of requests that came after it had settled."""
    found = []
    for begin, end in zip([b for b, _ in PHASES], [b for b, _ in PHASES[1:]] + [END], strict=True):
        lives = [life for life in house.lives.values() if begin + SETTLING <= life.arrival < end]
        gaps = [gap for life in lives for gap in life.gaps]
        found.append(p95([life.first_token for life in lives] if kind == "ttft" else gaps))
    return found


# -- under a load that doubles and halves ----------------------------------------------------------------------


@pytest.mark.search
def test_inter_token_target_is_kept_where_fixed_chunks_miss_it_or_miss_the_first_token() -> None:
    target, load = 0.040, doubling(4.5, 160, 24)
    large = by_phase(play(load, max_num_batched_tokens=1024, prompt_stretch=0), "itl")
    small = play(load, max_num_batched_tokens=64, prompt_stretch=0)
    adaptive = play(load, inter_token_target_ms=1000 * target)
    itl, ttft = by_phase(adaptive, "itl"), by_phase(adaptive, "ttft")
    assert max(large) > 1.3 * target
    assert all(value <= 1.1 * target for value in itl), itl
    assert by_phase(small, "ttft")[1] > 1.3 * ttft[1], (by_phase(small, "ttft"), ttft)


def test_prompts_make_a_step_with_decode_rows_about_twice_as_long_at_most_and_cost_no_throughput() -> None:
    backlog = [Arrival(0.001 * i, 160, 40) for i in range(300)]
    free, bounded = (play(backlog, max_num_seqs=16, prompt_stretch=stretch) for stretch in (0, 2.0))
    free_gaps, gaps = (
        sorted(gap for life in list(house.lives.values())[60:] for gap in life.gaps) for house in (free, bounded)
    )
    assert free_gaps[int(0.99 * len(free_gaps))] > 3 * statistics.median(free_gaps)
    assert gaps[int(0.99 * len(gaps))] <= 2.2 * statistics.median(gaps)
    assert max(life.tokens[-1] for life in bounded.lives.values()) <= 1.1 * max(
        life.tokens[-1] for life in free.lives.values()
    )


def test_inter_token_time_rests_at_the_target_when_there_is_more_to_do_than_it_allows() -> None:
    target = 0.040
    house = play([Arrival(0.01 * i, 300, 40) for i in range(400)], inter_token_target_ms=1000 * target)
    gaps = [gap for life in list(house.lives.values())[100:] for gap in life.gaps]  # the first ones taught it the cost
    assert p95(gaps) == pytest.approx(target, rel=0.1)


@pytest.mark.search
def test_first_token_target_is_kept_by_the_window_where_fixed_windows_miss_it_or_take_more_steps() -> None:
    target, load = 0.200, doubling(25.0, 24, 1)
    long = play(load, batch_wait_ms=180)
    none = play(load, batch_wait_ms=0)
    adaptive = play(load, batch_wait_ms=1000, latency_target_ms=1000 * target)
    ttft = by_phase(adaptive, "ttft")
    assert all(value == pytest.approx(target, rel=0.1) for value in ttft), ttft
    assert max(by_phase(long, "ttft")) > 1.1 * target
    assert len(adaptive.batches) < 0.5 * len(none.batches)


@pytest.mark.search
def test_both_targets_are_kept_together() -> None:
    house = play(doubling(4.0, 160, 24), batch_wait_ms=100, latency_target_ms=600, inter_token_target_ms=45)
    assert all(value <= 0.66 for value in by_phase(house, "ttft")), by_phase(house, "ttft")
    assert all(value <= 0.0495 for value in by_phase(house, "itl")), by_phase(house, "itl")


def test_target_is_kept_again_after_the_machine_became_twice_as_slow() -> None:
    house = FastOutputs(
        machine, max_num_seqs=64, max_num_batched_tokens=1024, enable_prefix_caching=False, inter_token_target_ms=60
    )
    house.play([Arrival(0.2 * i, 160, 24) for i in range(100)])
    house.seconds_of = lambda load: 2 * machine(load)
    slow_from = house.now
    house.play([Arrival(house.now + 0.4 * i, 160, 24) for i in range(100)])
    gaps = [gap for life in house.lives.values() if life.arrival > slow_from + 10 for gap in life.gaps]
    assert p95(gaps) < 1.1 * 0.060


def test_all_requests_end_even_if_no_step_is_short_enough() -> None:
    house = play([Arrival(0.0, 200, 10)] * 5, inter_token_target_ms=1, max_num_batched_tokens=64)
    assert len(house.ended()) == 5


def test_without_targets_the_limits_stay_as_they_are() -> None:
    house = play(doubling(4.5, 160, 24)[:200])
    batcher = house.scheduler.batcher
    assert batcher.step_limits([]) == StepLimits(64, 1024)
    assert batcher.controller.window(batcher.limits, 1, 1) == 0


# -- bounds ----------------------------------------------------------------------------------------------------


def learned() -> StepCost:
    cost, generator = StepCost(), random.Random(3)
    for _ in range(301):
        rows, chunk = generator.randint(1, 32), generator.choice([0, 0, 64, 256])
        load = StepLoad(rows + chunk, rows, 0, rows * 100 + chunk, rows * 100 + chunk * chunk // 2)
        cost.observe(load, machine(load))
    return cost


def many_histories() -> Iterator[LatencyController]:
    for seed in range(20):
        controller, generator = LatencyController(learned()), random.Random(seed)
        limits = batch_limits(32, 256, 0.1, None, 0.3, 0.03)
        for _ in range(200):
            controller.observe_token(generator.uniform(0, 0.1), limits)
            controller.observe_first_token(generator.uniform(0, 1), limits)
            controller.observe_step(StepLoad(16, 8, 0, 800, 800), generator.uniform(0, 0.1), limits)
        yield controller


def test_limits_are_never_beyond_the_admins_and_never_starve() -> None:
    for controller in many_histories():
        for target in (1e-6, 0.01, 0.03, 10.0):
            limits = batch_limits(32, 256, 0.1, None, target, target)
            for rows in (0, 1, 31, 32):
                found = controller.step_limits(limits, Running(rows, rows, 100 * rows))
                assert 1 <= found.max_rows <= 32
                assert min(256, rows + 16) <= found.max_tokens <= 256
            assert 0 <= controller.window(limits, 4, 100) <= min(0.1, target)


def test_running_rows_keep_their_tokens_after_the_admin_lowered_the_limits() -> None:
    found = LatencyController(learned()).step_limits(batch_limits(2, 16, itl_target=1e-6), Running(20, 20, 2000))
    assert found.max_tokens == 20


def test_window_shuts_for_tokens_that_take_as_long_as_the_target() -> None:
    controller, limits = LatencyController(learned()), batch_limits(32, 4096, 1.0, None, 0.2)
    assert controller.window(limits, 1, 10) > 0.05
    assert controller.window(limits, 8, 2000) == 0


def test_prompts_run_at_full_size_while_nobody_waits_for_a_token() -> None:
    controller, limits = LatencyController(learned()), batch_limits(32, 1024, itl_target=0.03)
    assert controller.step_limits(limits, Running(8, 0, 100)).max_tokens == 1024
    assert controller.step_limits(limits, Running(8, 1, 100)).max_tokens < 128


def test_one_step_in_fifty_is_larger_so_that_what_it_costs_is_known() -> None:
    cost = learned()
    controller, limits = LatencyController(cost), batch_limits(32, 1024, itl_target=0.03)
    sizes = []
    for _ in range(100):
        sizes.append(controller.step_limits(limits, Running(8, 8, 800)).max_tokens)
        cost.observe(StepLoad(8, 8, 0, 800, 800), machine(StepLoad(8, 8, 0, 800, 800)))
    assert sum(size > 2 * statistics.median(sizes) for size in sizes) == 2


def test_step_takes_the_most_tokens_whose_time_fits_beside_long_rows() -> None:
    cost, target = learned(), 0.06
    running = Running(4, 4, num_kv=8192, num_started=2048, num_adapters=1)

    def seconds(num_tokens: int) -> float:
        """Of a step with one more row, whose prompt fills it up."""
        chunk = num_tokens - 4
        read = 8192 + 4 + chunk + 2048
        return cost.seconds(StepLoad(num_tokens, 5, 2, read, 8192 + 4 + chunk * 2048 + chunk * (chunk + 1) // 2))

    found = LatencyController(cost).step_limits(batch_limits(32, 1024, itl_target=target), running).max_tokens
    assert 20 < found < 1024
    assert seconds(found) <= 0.9 * target < seconds(found + 1)


def test_fewer_rows_run_where_rows_have_had_long_texts() -> None:
    limits, found = batch_limits(32, 1024, itl_target=0.03), []
    for num_kv in (100, 20_000):
        controller = LatencyController(learned())
        for _ in range(50):
            controller.observe_step(StepLoad(8, 8, 0, 8 * num_kv, 8 * num_kv), 0.01, limits)
        found.append(controller.step_limits(limits, Running(8, 8, 8 * num_kv)).max_rows)
    assert found[1] < found[0]


def test_window_shortens_at_once_after_a_long_calm() -> None:
    controller, limits = LatencyController(learned()), batch_limits(32, 4096, 1.0, None, 1.0)
    for _ in range(1000):
        controller.observe_first_token(0.1, limits)
    for _ in range(6):
        controller.observe_first_token(2.0, limits)
    assert controller.window(limits, 1, 1) < 0.5


def test_late_token_of_a_step_that_was_interrupted_does_not_shrink_steps() -> None:
    controller, limits = LatencyController(learned()), batch_limits(32, 1024, itl_target=0.2)
    before = controller.step_limits(limits, Running(8, 8, 800))
    for _ in range(50):
        controller.observe_token(5.0, limits)
        controller.observe_step(StepLoad(8, 8, 0, 800, 800), 5.0, limits)
    assert controller.step_limits(limits, Running(8, 8, 800)) == before


def test_steps_grow_again_while_tokens_are_in_time_in_steps_that_take_what_they_may() -> None:
    controller, limits = LatencyController(learned()), batch_limits(32, 1024, itl_target=0.05)
    before = controller.step_limits(limits, Running(8, 8, 800)).max_tokens
    for _ in range(20):
        controller.observe_token(0.045, limits)
        controller.observe_step(StepLoad(8, 8, 0, 800, 800), 0.045, limits)
    assert controller.step_limits(limits, Running(8, 8, 800)).max_tokens > before


def test_window_is_half_the_first_tokens_target_at_first() -> None:
    controller = LatencyController(learned())
    assert controller.window(batch_limits(32, 4096, 1.0, None, 0.4), 1, 10) == pytest.approx(0.2)


# -- what is shown ---------------------------------------------------------------------------------------------


def test_p95_is_of_the_newest_times_by_nearest_rank() -> None:
    times = LatencyWindow()
    assert times.p95() is None
    for value in range(2000):
        times.add(float(value))
    assert times.p95() == pytest.approx(statistics.quantiles(range(1488, 2000), n=20, method="inclusive")[-1], abs=1)


def test_snapshot_says_what_is_in_force_and_why() -> None:
    house = play(doubling(4.5, 160, 24)[:300], inter_token_target_ms=40)
    shown = house.engine.stats().batcher
    assert shown is not None
    assert shown.max_rows <= 64
    assert shown.limits.itl_target == 0.040
    assert shown.itl_p95 is not None
    assert 0.02 < shown.itl_p95 < 0.05
    assert shown.cost["step"] > 1e-3
    assert "between tokens" in shown.reason
    house.scheduler.batcher.tune(Tune(inter_token_target_ms=0.0))
    shown = house.engine.stats().batcher
    assert shown is not None
    assert shown.reason == "no target is set: the limits are in force as they are"


OPEN_STEPS = "full steps: between tokens 100 ms (p95), within the target of 1000 ms"


@pytest.mark.parametrize(
    ("limits", "step", "window", "p95s", "reason"),
    [
        (batch_limits(8, 64, itl_target=0.05), StepLimits(8, 32), 0.0, (None, 0.061),
         "smaller steps: between tokens 61 ms (p95), above the target of 50 ms"),
        (batch_limits(8, 64, itl_target=0.05), StepLimits(8, 32), 0.0, (None, 0.049),
         "steps kept smaller: between tokens 49 ms (p95), within the target of 50 ms"),
        (batch_limits(8, 64, itl_target=0.05), StepLimits(8, 64), 0.0, (None, None),
         "full steps: between tokens not measured yet, the target is 50 ms"),
        (batch_limits(8, 64, 0.1, ttft_target=0.05), StepLimits(8, 64), 0.02, (0.06, None),
         "wait for a fuller batch shortened to 20 ms: first tokens 60 ms (p95), above the target of 50 ms"),
        (batch_limits(8, 64, 0.01, ttft_target=0.05, itl_target=1.0), StepLimits(8, 64), 0.01, (0.04, 0.1),
         f"{OPEN_STEPS}; wait for a fuller batch up to 10 ms: first tokens 40 ms (p95), within the target of 50 ms"),
        (batch_limits(8, 64, ttft_target=0.05), StepLimits(8, 64), 0.0, (0.04, 0.1),
         "no wait for a fuller batch: first tokens 40 ms (p95), within the target of 50 ms"),
        (batch_limits(8, 64, ttft_target=9.0), StepLimits(8, 64), 0.0, (92.112, None),
         "no wait for a fuller batch: first tokens 92.1 s (p95), above the target of 9000 ms"),
    ],
)  # fmt: skip
def test_reason_names_the_targets_and_what_was_measured(
    limits: BatchLimits, step: StepLimits, window: float, p95s: tuple[float | None, float | None], reason: str
) -> None:
    assert reason_of(limits, step, window, *p95s) == reason


def test_noise_that_small_steps_do_not_help_against_does_not_take_the_throughput() -> None:
    generator = random.Random(0)

    def shaken(load: StepLoad) -> float:
        return (35e-3 + 1e-4 * load.num_tokens) * generator.lognormvariate(0, 0.3)

    load = [Arrival(0.25 * i, 160, 24) for i in range(200)]
    ends = []
    for settings in ({}, {"inter_token_target_ms": 50}):
        house = FastOutputs(
            shaken, max_num_seqs=32, max_num_batched_tokens=512, enable_prefix_caching=False, **settings
        )
        house.play(load)
        ends.append(p95(life.first_token for life in house.lives.values()))
    free, held = ends
    assert held < 3 * free
