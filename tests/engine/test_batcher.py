"""The wait window and the sizes: when a batch starts, and with whom."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lora_serve.core.batch import Batch
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.messages import Tune
from lora_serve.core.request import InferenceRequest
from lora_serve.engine.batcher import Batcher, padded_length
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.sequence import Sequence
from lora_serve.engine.step_cost import StepCost, StepLimits
from tests.engine.timed_world import Arrival, TimedWorld
from tests.engine.world import adapter, batch_limits

STEP = 0.001


def world(**settings: Any) -> TimedWorld:
    return TimedWorld(lambda load: STEP, **{"batch_wait_ms": 50, **settings})


def num_rows(batch: Batch | None) -> int:
    assert batch is not None
    return len(batch.rows)


def waiting(count: int, arrival: float = 0.0, num_prompt: int = 4, **fields: Any) -> list[Sequence]:
    requests = [InferenceRequest(f"{i}", (1,) * num_prompt, arrival_time=arrival, **fields) for i in range(count)]
    return [Sequence(i, request, 0, list(request.prompt_token_ids), ()) for i, request in enumerate(requests)]


# -- the window ------------------------------------------------------------------------------------------------


def test_whoever_comes_within_the_window_runs_in_one_batch_that_starts_at_its_end() -> None:
    house = world()
    house.play([Arrival(0.010, 4, 1), Arrival(0.030, 4, 1), Arrival(0.059, 4, 1), Arrival(0.0611, 4, 1)])
    starts = [(round(at, 6), len(batch.rows)) for at, batch in house.batches]
    assert starts == [(0.060, 3), (pytest.approx(0.1111), 1)]


def test_lone_request_starts_when_its_window_ends_and_not_later() -> None:
    house = world()
    house.play([Arrival(0.0, 4, 1)])
    assert [at for at, _ in house.batches] == [0.050]


def test_preferred_batch_size_starts_a_batch_at_once() -> None:
    house = world(preferred_batch_size=3)
    house.play([Arrival(at, 4, 1) for at in (0.0, 0.010, 0.020)])
    assert [(at, len(batch.rows)) for at, batch in house.batches] == [(0.020, 3)]


def test_as_many_as_there_are_places_start_at_once() -> None:
    house = world(max_num_seqs=2)
    house.play([Arrival(0.0, 4, 1), Arrival(0.010, 4, 1)])
    assert [at for at, _ in house.batches] == [0.010]


def test_as_many_tokens_as_a_step_takes_start_at_once() -> None:
    house = world(max_num_batched_tokens=32)
    house.play([Arrival(0.0, 20, 1), Arrival(0.010, 12, 1)])
    assert [at for at, _ in house.batches] == [0.010]


def test_tokens_that_running_rows_need_count_as_taken() -> None:
    house = world(max_num_batched_tokens=32)
    house.arrive("running", num_output=100)
    house.now = 0.050
    assert num_rows(house.timed_step()) == 1
    house.arrive("new", num_prompt=31)
    assert num_rows(house.timed_step()) == 2


def test_running_rows_do_not_wait_for_the_window_of_others() -> None:
    house = world()
    house.arrive("running", num_output=100)
    house.now = 0.050
    house.timed_step()
    house.arrive("new")
    arrived_at = house.now
    while "new" not in house.ended():
        assert num_rows(house.timed_step()) in (1, 2)
    gaps = house.lives["running"].gaps
    assert gaps == pytest.approx([STEP] * len(gaps))
    assert house.lives["new"].tokens[0] - arrived_at == pytest.approx(0.050 + STEP, abs=STEP)


def test_no_window_is_pure_continuous_batching() -> None:
    house = world(batch_wait_ms=0)
    house.play([Arrival(0.0, 4, 3), Arrival(0.0005, 4, 1), Arrival(0.1, 4, 1)])
    starts = [(round(at, 6), len(batch.rows)) for at, batch in house.batches]
    assert starts == [(0.0, 1), (0.001, 2), (0.002, 1), (0.1, 1)]


def test_request_whose_adapter_is_cold_opens_no_window_and_fills_no_batch() -> None:
    house = world(preferred_batch_size=2, auto_load=False)
    cold = adapter("cold")
    house.arrive("cold", ref=cold)
    assert house.timed_step() is None
    assert house.scheduler.next_deadline(house.now) is None
    house.now = 0.030
    house.arrive("warm")
    assert house.timed_step() is None, "the cold one was counted"
    assert house.scheduler.next_deadline(house.now) == pytest.approx(0.080)
    house.now = 0.035
    house.residency.load_finished(_loaded(cold.digest))
    house.scheduler.adapter_arrived(cold.digest, house.now)
    assert num_rows(house.timed_step()) == 2


def test_window_of_a_cold_request_counts_from_its_adapters_arrival() -> None:
    house = world(auto_load=False)
    cold = adapter("cold")
    house.arrive("cold", ref=cold)
    house.timed_step()
    house.now = 0.200
    house.residency.load_finished(_loaded(cold.digest))
    house.scheduler.adapter_arrived(cold.digest, house.now)
    assert house.timed_step() is None
    assert house.scheduler.next_deadline(house.now) == pytest.approx(0.250)
    house.now = 0.250
    assert num_rows(house.timed_step()) == 1


def test_preempted_request_does_not_wait_again_and_takes_nobody_along() -> None:
    house = world(num_blocks=8, batch_wait_ms=1000, preferred_batch_size=2, enable_prefix_caching=False)
    house.arrive("old", num_prompt=12, num_output=17)
    house.arrive("young", num_prompt=12, num_output=17)
    while house.scheduler.num_preemptions == 0:
        house.timed_step()
    house.arrive("new", num_prompt=4)
    for _ in range(80):
        house.timed_step()
    assert "young" in house.ended()
    assert house.now < 0.1, "the preempted one waited for a window"
    assert "new" not in house.ended(), "the window of the new one was not kept"
    house.now = 1.5
    house.timed_step()
    assert house.ended() == {"old", "young", "new"}


def test_time_that_passes_between_the_step_and_the_sleep_loses_no_window() -> None:
    house = world()
    house.arrive("a")
    house.now = 0.0499
    assert house.timed_step() is None
    assert house.scheduler.next_deadline(0.0501) == pytest.approx(0.050)


def test_window_that_ended_without_room_is_slept_through_and_the_next_one_is_not() -> None:
    house = world(max_num_seqs=1)
    batcher = house.scheduler.batcher
    first, second = waiting(1, 0.0)[0], waiting(1, 0.020)[0]
    batcher.bucket_of = lambda sequence: id(sequence)
    assert batcher.opens_at([first, second], after=0.060) == pytest.approx(0.070)
    assert batcher.opens_at([first, second], after=0.080) is None


# -- buckets ---------------------------------------------------------------------------------------------------


def test_each_bucket_has_its_own_window() -> None:
    batcher = Batcher(batch_limits(8, 512, batch_wait=0.050), StepCost(), padded_length)
    both = waiting(1, 0.0, num_prompt=10) + waiting(1, 0.030, num_prompt=100)
    limits = StepLimits(8, 512)
    assert batcher.open_buckets(both, limits, 0, 512, 0.049) == frozenset()
    assert batcher.open_buckets(both, limits, 0, 512, 0.051) == {16}
    assert batcher.open_buckets(both, limits, 0, 512, 0.081) == {16, 128}


def test_padding_counts_when_a_bucket_is_full() -> None:
    batcher = Batcher(batch_limits(8, 512, batch_wait=0.050), StepCost(), padded_length)
    limits = StepLimits(8, 512)
    assert batcher.open_buckets(waiting(3, num_prompt=65), limits, 0, 512, 0.0) == frozenset()
    assert batcher.open_buckets(waiting(4, num_prompt=65), limits, 0, 512, 0.0) == {128}


def test_buckets_without_a_window_are_all_open() -> None:
    batcher = Batcher(batch_limits(8, 512), StepCost(), padded_length)
    both = waiting(1, num_prompt=10) + waiting(1, num_prompt=100)
    assert batcher.open_buckets(both, StepLimits(8, 512), 0, 512, 0.0) == {16, 128}


# -- sizes and tuning ------------------------------------------------------------------------------------------


def test_thousand_waiting_cost_less_than_a_millisecond() -> None:
    batcher = Batcher(batch_limits(64, 512, batch_wait=10.0), StepCost())
    many = waiting(1000, arrival=0.0)
    limits = StepLimits(64, 512)
    fastest = min(_seconds(lambda: batcher.open_buckets(many, limits, 0, 512, 1.0)) for _ in range(5))
    assert fastest < 1e-3


def test_new_limits_hold_from_the_next_step_on_and_running_rows_keep_their_places() -> None:
    house = world(batch_wait_ms=0)
    for name in "abc":
        house.arrive(name, num_output=5)
    assert num_rows(house.timed_step()) == 3
    house.scheduler.batcher.tune(Tune(max_num_seqs=1, max_num_batched_tokens=2))
    house.arrive("d", num_prompt=2)
    assert num_rows(house.timed_step()) == 3, "a running row waited, or a new one was let in"
    while "c" not in house.ended():
        house.timed_step()
    assert num_rows(house.timed_step()) == 1
    assert "d" in house.ended()


def test_window_is_tuned_while_somebody_waits_in_it() -> None:
    house = world(batch_wait_ms=10_000)
    house.arrive("a")
    assert house.timed_step() is None
    house.now = 1.0
    house.scheduler.batcher.tune(Tune(batch_wait_ms=500.0))
    assert num_rows(house.timed_step()) == 1


def test_tokens_below_rows_are_refused_and_nothing_changes() -> None:
    batcher = Batcher(batch_limits(8, 64), StepCost())
    with pytest.raises(InvalidRequestError) as refusal:
        batcher.tune(Tune(max_num_seqs=65, batch_wait_ms=1000.0))
    assert refusal.value.param == "max_num_seqs"
    assert batcher.limits == batch_limits(8, 64)
    with pytest.raises(InvalidRequestError) as refusal:
        batcher.tune(Tune(max_num_batched_tokens=7))
    assert refusal.value.param == "max_num_batched_tokens"


def test_zero_turns_off_what_may_be_off() -> None:
    batcher = Batcher(batch_limits(8, 64, 0.1, 4, 1.0, 0.05), StepCost())
    batcher.tune(Tune(preferred_batch_size=0, latency_target_ms=0.0, inter_token_target_ms=0.0))
    assert batcher.limits == batch_limits(8, 64, 0.1)
    batcher.tune(Tune(batch_wait_ms=0.0))
    assert batcher.limits == batch_limits(8, 64)


def _loaded(digest: str) -> Any:
    return LoadFinished(digest, digest, None, 0.0)


def _seconds(work: Any) -> float:
    """Of the processor: other programs cost no time."""
    start = time.thread_time()
    work()
    return time.thread_time() - start
