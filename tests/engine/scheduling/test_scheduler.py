"""Continuous batching: who runs, in what order, within which limits."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import (
    AdapterUnavailableError,
    InternalError,
    NumericalError,
    RequestTimeoutError,
)
from lora_serve.core.messages import ErrorEvent, FinishEvent, StartedEvent, Tune
from lora_serve.core.model_spec import ONE_ROPE, LongRope
from lora_serve.core.request import FinishReason, OnCold
from tests.engine.fake_constraints import FakeConstraints, grammar
from tests.engine.fake_runner import EXPLOSION, POISON, next_token
from tests.engine.world import World, adapter


def test_rows_of_base_and_several_adapters_share_one_batch() -> None:
    world = World()
    for index, ref in enumerate([None, adapter("a"), adapter("b"), adapter("a")]):
        world.add(f"r{index}", [1, 2, index], ref)
    world.run()
    world.check_answers()
    assert max(batch.num_adapters for batch in world.runner.batches) == 2
    assert max(len(batch.rows) for batch in world.runner.batches) == 4
    world.check_nothing_held()


def test_long_prompts_run_in_chunks_while_others_decode() -> None:
    world = World(max_num_batched_tokens=16)
    world.add("short", [1, 2], max_tokens=12)
    world.step()
    world.add("long", list(range(60)))
    world.run()
    world.check_answers()
    assert all(batch.num_tokens <= 16 for batch in world.runner.batches)
    chunks = [batch for batch in world.runner.batches if batch.num_tokens > 8]
    assert len(chunks) >= 4
    assert all(len(batch.rows) == 2 for batch in chunks), "the decoding row must run in every step"


def test_sampler_is_told_the_answer_so_far_of_a_row_with_bad_words() -> None:
    """The answer alone: a word that begins in the prompt does not count."""
    world = World()
    world.add("plain", [1, 2], max_tokens=3)
    world.add("strict", [3, 4], max_tokens=3, bad_words=((7, 8),))
    world.run()
    told: dict[int, list[tuple[int, ...]]] = {}
    for row in (row for batch in world.runner.batches for row in batch.rows if row.sample is not None):
        told.setdefault(row.sequence_id, []).append(row.sample.output_token_ids)
    answer = tuple(world.tokens["strict"])
    assert sorted(told.values()) == [[(), (), ()], [(), answer[:1], answer[:2]]]


def test_never_more_rows_than_allowed_and_waiting_rows_enter_when_others_leave() -> None:
    world = World(max_num_seqs=3)
    for index in range(10):
        world.add(f"r{index}", [index], max_tokens=2 + index % 3)
    world.run()
    world.check_answers()
    assert len(world.ends) == 10
    assert max(len(batch.rows) for batch in world.runner.batches) == 3


def test_nobody_enters_while_more_rows_run_than_a_lowered_limit_allows() -> None:
    world = World(max_num_seqs=4)
    for index in range(4):
        world.add(f"r{index}", [index], max_tokens=4 + 4 * index)
    world.step()
    world.command(Tune(max_num_seqs=2))
    world.add("late", [9], max_tokens=2)
    world.run_until("late")
    assert world.order == ["r0", "r1", "r2", "late"]
    world.check_answers()


def test_short_prompt_does_not_overtake_a_long_one_that_waits_for_blocks() -> None:
    world = World(num_blocks=12)
    world.add("runs", [1] * 24, max_tokens=8)
    world.step()
    world.add("long", [2] * 24, max_tokens=2)
    world.add("short", [3], max_tokens=30)
    world.step()
    assert [sequence.request.request_id for sequence in world.scheduler.running] == ["runs"]
    world.run()
    assert world.order == ["runs", "long", "short"]
    world.check_answers()


def test_when_blocks_run_out_the_youngest_is_preempted_and_loses_nothing() -> None:
    world = World(num_blocks=12)
    for index in range(4):
        world.add(f"r{index}", [index] * 8, adapter("a"), max_tokens=30)
    world.run()
    world.check_answers()
    assert world.scheduler.num_preemptions > 0
    assert world.order[0] == "r0", "the oldest is never the victim"
    assert all(world.prompts[f"r{index}"] for index in range(4))
    world.check_nothing_held()


def test_prompt_preempted_between_two_chunks_keeps_all_its_logprobs() -> None:
    """It is computed again in chunks of other lengths."""
    world = World(num_blocks=19, max_num_batched_tokens=16)
    for index in range(3):
        world.add(f"old{index}", [index] * 3, max_tokens=13)
    world.step()
    world.add("young", list(range(60)), max_tokens=2, prompt_logprobs=0)
    world.run()
    assert world.scheduler.num_preemptions > 0
    world.check_answers()
    world.check_nothing_held()


def test_lower_priority_number_runs_first() -> None:
    world = World(max_num_seqs=1)
    world.add("late", [1], priority=5)
    world.add("soon", [2], priority=-1)
    world.run()
    assert world.order == ["soon", "late"]


def test_start_of_a_request_is_told_once_though_it_is_preempted() -> None:
    world = World(num_blocks=8, max_num_seqs=4, enable_prefix_caching=False)
    for index in range(4):
        world.add(f"r{index}", [index] * 8, max_tokens=20)
    started: list[str] = []
    for _ in range(300):
        _, events = world.engine.step()
        world.take([event for event in events if not isinstance(event, StartedEvent)])
        started += [event.request_id for event in events if isinstance(event, StartedEvent)]
    assert world.scheduler.num_preemptions > 0
    assert sorted(started) == ["r0", "r1", "r2", "r3"]
    world.check_answers()


def test_abort_frees_blocks_and_slot_at_once_waiting_or_running() -> None:
    world = World(max_num_seqs=1)
    world.add("running", [1, 2, 3], adapter("a"), max_tokens=100)
    world.add("waiting", [1, 2, 3], adapter("b"), max_tokens=100)
    world.step()
    world.step()
    world.scheduler.abort("running")
    world.scheduler.abort("waiting")
    world.scheduler.abort("never-seen")
    world.check_nothing_held()
    assert not world.ends


def test_deadline_ends_a_request_with_words() -> None:
    world = World()
    world.add("late", [1], max_tokens=100, deadline=time.monotonic() - 0.001)
    world.step()
    assert isinstance(world.error("late"), RequestTimeoutError)
    world.check_nothing_held()


def test_row_that_is_not_a_number_ends_alone() -> None:
    world = World()
    world.add("good", [1, 2], adapter("a"))
    world.add("bad", [POISON], adapter("b"))
    world.run()
    world.check_answers()
    assert isinstance(world.error("bad"), NumericalError)
    assert isinstance(world.ends["good"], FinishEvent)
    world.check_nothing_held()


def test_batch_that_raises_is_run_row_by_row_and_only_the_guilty_row_ends() -> None:
    world = World()
    world.add("good", [1, 2], adapter("a"))
    world.add("bad", [EXPLOSION], adapter("b"))
    world.add("base", [4])
    world.run()
    world.check_answers()
    assert isinstance(world.error("bad"), InternalError)
    assert isinstance(world.ends["good"], FinishEvent)
    assert isinstance(world.ends["base"], FinishEvent)
    world.check_nothing_held()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_ids_and_min_tokens(ignore_eos: bool) -> None:
    world = World()
    third = next_token(None, [1, next_token(None, [1]), next_token(None, [1, next_token(None, [1])])])
    world.add("stops", [1], stop_token_ids=(third,), ignore_eos=ignore_eos)
    world.add("goes on", [1], stop_token_ids=(third,), min_tokens=4)
    world.run()
    stopped = world.ends["stops"]
    assert isinstance(stopped, FinishEvent)
    assert (stopped.reason, stopped.stop_token_id) == (FinishReason.STOP, third)
    assert len(world.tokens["stops"]) == 3
    assert len(world.tokens["goes on"]) == 5


def test_sequence_ends_at_the_models_length() -> None:
    world = World(max_model_len=10)
    world.add("long", [1] * 6, max_tokens=100)
    world.run()
    end = world.ends["long"]
    assert isinstance(end, FinishEvent)
    assert end.reason is FinishReason.LENGTH
    assert len(world.tokens["long"]) == 4


def test_no_tokens_asked_for_gives_the_prompt_event_only() -> None:
    world = World()
    world.add("echo", [1, 2, 3], max_tokens=0)
    world.run()
    assert world.tokens["echo"] == []
    assert "echo" in world.prompts
    world.check_nothing_held()


def test_request_for_cold_adapter_does_not_block_base_model() -> None:
    world = World(auto_load=False)
    world.add("cold", [1], adapter("a"))
    world.add("base", [2])
    for _ in range(8):
        world.step()
    assert "base" in world.ends
    assert "cold" not in world.ends
    assert world.loading == [adapter("a")]
    world.finish_load(adapter("a"))
    world.run()
    world.check_answers()
    assert world.prompts["cold"].timings.load > 0


def test_on_cold_fail_refuses_at_once_and_loads_for_the_next() -> None:
    world = World(auto_load=False)
    world.add("first", [1], adapter("a"), on_cold=OnCold.FAIL)
    assert isinstance(world.error("first"), AdapterUnavailableError)
    world.finish_load(adapter("a"))
    world.add("second", [1], adapter("a"), on_cold=OnCold.FAIL)
    world.run()
    world.check_answers()
    assert isinstance(world.ends["second"], FinishEvent)


def test_max_cold_wait_ends_the_wait_and_only_a_cold_one() -> None:
    world = World(auto_load=False)
    world.add("impatient", [1], adapter("a"), max_cold_wait=0.0)
    world.add("base", [1], max_cold_wait=0.0)
    world.step()
    assert isinstance(world.error("impatient"), AdapterUnavailableError)
    world.step()
    assert not isinstance(world.ends.get("base"), ErrorEvent)


def test_next_deadline_is_the_earliest() -> None:
    world = World(auto_load=False)
    assert world.scheduler.next_deadline(0.0) is None
    world.add("a", [1], deadline=50.0, arrival_time=1.0)
    world.add("b", [1], adapter("x"), max_cold_wait=5.0, arrival_time=2.0)
    assert world.scheduler.next_deadline(0.0) == 7.0


@given(st.data())
def test_any_traffic_ends_with_right_answers_and_nothing_held(data: st.DataObject) -> None:
    """Random adapters, lengths, aborts and tight memory: no loss, no wrong answer, no leak, no standstill."""
    world = World(
        num_blocks=data.draw(st.integers(12, 40), "blocks"),
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(1, 6), "rows"),
        max_num_batched_tokens=data.draw(st.integers(16, 40), "tokens"),
        max_loras=data.draw(st.integers(1, 3), "slots"),
        adapter_host_memory=data.draw(st.integers(10, 60), "host bytes"),
        long_rope=data.draw(st.sampled_from([ONE_ROPE, LongRope(17, True), LongRope(17, False)]), "long rope"),
    )
    names = [None, "a", "b", "c", "d", "e"]
    aborted = set()
    for index in range(data.draw(st.integers(1, 14), "requests")):
        name = data.draw(st.sampled_from(names))
        prompt = data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=20))
        sampling = {
            "max_tokens": data.draw(st.integers(1, 18)),
            "prompt_logprobs": data.draw(st.sampled_from([None, None, 0])),
        }
        world.add(f"r{index}", prompt, adapter(name) if name else None, **sampling)
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
        if data.draw(st.integers(0, 5)) == 0 and f"r{index}" not in world.ends:
            aborted.add(f"r{index}")
            world.scheduler.abort(f"r{index}")
    world.run()
    world.check_answers()
    assert set(world.ends) == set(world.tokens) - aborted
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    world.check_nothing_held()


def test_every_token_is_charged_once_and_those_without_a_choice_are_told_apart() -> None:
    world = World(constraints=FakeConstraints())
    charged: list[int] = []
    world.scheduler._policy.served = lambda sequence, num_prompt, num_output: charged.append(num_output)  # type: ignore[method-assign]
    world.add("text", [1, 2], max_tokens=6)
    world.run()
    assert world.engine.stats().num_forced == 0
    world.add(
        "form", [1, 2], grammar=grammar(range(100, 300), [7], [8], range(100, 300), range(100, 300)), max_tokens=9
    )
    world.run()
    assert world.engine.stats().num_forced == 2
    assert sum(charged) == len(world.tokens["text"]) + len(world.tokens["form"]) == 11


def test_history_is_brought_where_it_is_read() -> None:
    world = World()
    world.add("plain", [1, 2, 3], max_tokens=3)
    world.add("penalties", [4, 5, 6], max_tokens=3, repetition_penalty=1.5)
    world.add("bad words", [7, 8, 9], max_tokens=3, bad_words=((1,),))
    world.run()
    world.check_answers()
    samples = [row.sample for row in world.runner.batches[-1].rows]
    assert [sample and sample.prompt_token_ids for sample in samples] == [(), (4, 5, 6), ()]
    outputs = [(), *(tuple(world.tokens[name][:2]) for name in ("penalties", "bad words"))]
    assert [sample and sample.output_token_ids for sample in samples] == outputs
