"""What a step will take, learned: against machines whose cost is known."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import pytest

from lora_serve.core.batch import Batch, Row, StepLoad
from lora_serve.core.request import PoolingParams
from lora_serve.engine.step_cost import StepCost


def true_seconds(load: StepLoad) -> float:
    return (
        4e-3 + 2e-4 * load.num_tokens + 1e-4 * load.num_rows + 4e-4 * load.num_adapters
        + 4e-7 * load.num_kv_read + 3e-8 * load.num_attended
    )  # fmt: skip


def loads(seed: int) -> Iterator[StepLoad]:
    """As an engine makes them: runs of decode steps of the same rows, a prompt's chunk now and then."""
    generator = random.Random(seed)
    while True:
        rows = generator.randint(1, 24)
        for _ in range(generator.randint(1, 20)):
            kv = rows * generator.randint(50, 300)
            chunk, start = generator.randint(16, 400), generator.choice([0, 256])
            pairs = chunk * start + chunk * chunk // 2
            yield (
                StepLoad(rows + chunk, rows + 1, min(8, rows), kv + start + chunk, kv + pairs)
                if generator.random() < 0.15
                else StepLoad(rows, rows, min(8, rows), kv, kv)
            )


def learn(
    cost: StepCost, table: Iterator[StepLoad], count: int, *, factor: float = 1.0, outliers: bool = False
) -> None:
    generator = random.Random(7)
    for _ in range(count):
        load = next(table)
        noise = generator.lognormvariate(0, 0.1) * (50 if outliers and generator.random() < 0.02 else 1)
        cost.observe(load, factor * true_seconds(load) * noise)


def error(cost: StepCost, table: Iterator[StepLoad], factor: float = 1.0) -> float:
    """Median over 200 steps it has not seen."""
    checked = [next(table) for _ in range(200)]
    return statistics.median(abs(cost.seconds(load) / (factor * true_seconds(load)) - 1) for load in checked)


@pytest.mark.parametrize("factor", [0.02, 1.0, 100.0])
def test_after_200_steps_the_median_error_is_below_15_percent_on_any_machine(factor: float) -> None:
    cost, table = StepCost(), loads(1)
    learn(cost, table, 200, factor=factor)
    assert error(cost, table, factor) < 0.08


def test_single_steps_that_took_50_times_as_long_change_little() -> None:
    cost, table = StepCost(), loads(2)
    learn(cost, table, 400, outliers=True)
    assert error(cost, table) < 0.12
    load = StepLoad(8, 8, 4, 800, 800)
    before = cost.seconds(load)
    cost.observe(load, 50 * before)
    assert cost.seconds(load) < 1.25 * before


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_machine_that_becomes_slower_or_faster_is_known_again_within_50_steps(factor: float) -> None:
    cost, table = StepCost(), loads(3)
    learn(cost, table, 300)
    learn(cost, table, 50, factor=factor)
    assert error(cost, table, factor) < 0.15


def test_prefill_after_a_long_time_of_decode_is_still_known() -> None:
    cost, table = StepCost(), loads(4)
    learn(cost, table, 300)
    decode = StepLoad(8, 8, 8, 1600, 1600)
    for _ in range(2000):
        cost.observe(decode, true_seconds(decode))
    chunk = StepLoad(264, 9, 8, 1856, 1600 + 256 * 257 // 2)
    assert cost.seconds(chunk) == pytest.approx(true_seconds(chunk), rel=0.3)


def test_no_coefficient_and_no_prediction_is_ever_negative() -> None:
    cost, generator = StepCost(), random.Random(5)
    for _ in range(1000):
        n = generator.randint(1, 32)
        cost.observe(StepLoad(n, n, n, 10 * n, 10 * n), generator.uniform(1e-4, 1.0))
        assert min(cost.coefficients.values()) >= 0
        assert cost.seconds(StepLoad(1, 1, 0, 1, 1)) > 0
    assert cost.seconds(StepLoad(512, 1, 0, 512, 10**5)) > 0


def test_step_without_a_duration_teaches_nothing() -> None:
    cost = StepCost()
    cost.observe(StepLoad(1, 1, 0, 1, 1), 0.0)
    assert cost.num_observed == 0


def test_quadratic_part_of_a_prompt_is_learned() -> None:
    cost, generator = StepCost(), random.Random(6)

    def seconds(load: StepLoad) -> float:
        return 1e-3 + 1e-5 * load.num_tokens + 1e-7 * load.num_attended

    for _ in range(300):
        n = generator.randint(16, 2000)
        cost.observe(StepLoad(n, 1, 0, n, n * n // 2), seconds(StepLoad(n, 1, 0, n, n * n // 2)))
    for n in (100, 500, 2000):
        load = StepLoad(n, 1, 0, n, n * n // 2)
        assert cost.seconds(load) == pytest.approx(seconds(load), rel=0.2)


def test_its_own_error_is_shown() -> None:
    cost, table = StepCost(), loads(8)
    assert cost.relative_error is None
    learn(cost, table, 600)
    assert cost.relative_error == pytest.approx(0.07, abs=0.05)  # of noise of 10 %


def test_learning_one_step_takes_less_than_100_microseconds() -> None:
    cost, load = StepCost(), StepLoad(8, 8, 4, 800, 800)

    def hundred() -> float:
        start = time.thread_time()
        for _ in range(100):
            cost.observe(load, 0.01)
        return (time.thread_time() - start) / 100

    assert min(hundred() for _ in range(20)) < 100e-6


def test_pairs_of_a_batch_are_causal_for_answers_and_all_for_vectors() -> None:
    def row(count: int, start: int, pool: PoolingParams | None = None) -> Row:
        return Row(0, (1,) * count, start, (), (), None, None, pool=pool)

    def pairs(row: Row) -> int:
        return sum(row.start + i + 1 for i in range(len(row.token_ids)))

    for one in (row(1, 0), row(1, 99), row(7, 0), row(7, 32)):
        assert Batch((one, one), ()).load.num_attended == 2 * pairs(one)
    assert Batch((row(7, 0, PoolingParams()),), ()).load.num_attended == 49
