"""Who answers when an adapter is cold: it, the base model, the version before, or nobody."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError
from lora_serve.core.figures import EvictionReason
from lora_serve.core.messages import FinishEvent
from lora_serve.core.request import AdapterUse, OnCold
from tests.engine.world import World, adapter

NEW, OLD = adapter("new"), adapter("old")
BASE = {"on_cold": OnCold.BASE, "fallback": ()}
PREVIOUS = {"on_cold": OnCold.PREVIOUS, "fallback": (AdapterUse(OLD),)}


def warm(world: World, *names: str) -> None:
    """These adapters are in host memory or further."""
    for name in names:
        world.add(f"warms {name}", [1], adapter(name), max_tokens=1)
        world.step()
        world.finish_load(adapter(name))
        world.run()
        assert f"warms {name}" in world.ends


def test_base_answers_at_once_and_the_adapter_is_loaded_for_the_next() -> None:
    world = World(auto_load=False)
    world.add("first", [1, 2], NEW, **BASE)
    world.step()
    assert world.prompts["first"].fell_back
    assert world.loading == [NEW]
    world.finish_load(NEW)
    world.add("second", [1, 2], NEW, **BASE)
    world.run()
    assert not world.prompts["second"].fell_back
    assert world.tokens["first"] != world.tokens["second"]
    world.check_answers()
    world.check_nothing_held()


@pytest.mark.parametrize("falls_back", [True, False])
def test_an_answer_ends_at_the_tokens_of_the_adapters_that_gave_it(falls_back: bool) -> None:
    world = World(auto_load=False)
    if not falls_back:
        warm(world, "new")
    world.add("whole", [1, 2], NEW, **BASE)
    world.run_until("whole")
    whole = world.tokens["whole"]
    own, others = (whole[2],), (whole[1],)  # of the adapters that answer, and of those that do not
    world = World(auto_load=False)
    if not falls_back:
        warm(world, "new")
    ends = (others, own) if falls_back else (own, others)
    world.add("ended", [1, 2], NEW, eos_token_ids=ends[0], fallback_eos_token_ids=ends[1], **BASE)
    world.run_until("ended")
    assert world.prompts["ended"].fell_back == falls_back
    assert world.tokens["ended"] == whole[:3]


def test_base_waits_as_long_as_it_may_and_the_adapter_answers_if_it_comes_in_time() -> None:
    world = World(auto_load=False)
    world.add("in time", [1], NEW, max_cold_wait=60.0, **BASE)
    world.step()
    assert "in time" not in world.prompts
    world.finish_load(NEW)
    world.run()
    assert not world.prompts["in time"].fell_back
    world.check_answers()


def test_base_answers_when_the_wait_is_over_and_load_is_the_time_waited() -> None:
    world = World(auto_load=False)
    start = time.monotonic()
    world.add("late", [1], NEW, max_cold_wait=5.0, arrival_time=start - 4.0, **BASE)
    world.step()
    assert "late" not in world.prompts
    world.take(world.scheduler.expire(start + 1.5))
    world.run_until("late")
    assert world.prompts["late"].fell_back
    assert world.prompts["late"].timings.load == pytest.approx(5.5, abs=0.1)
    world.check_answers()
    world.check_nothing_held()


def test_load_is_zero_for_who_did_not_wait() -> None:
    world = World(auto_load=False)
    world.add("base", [1], NEW, **BASE)
    world.run_until("base")
    assert world.prompts["base"].timings.load == 0.0


def test_load_ends_when_the_adapter_is_here_even_if_no_row_is_free() -> None:
    world = World(auto_load=False, max_num_seqs=1)
    world.add("long", [1], max_tokens=50)
    world.step()
    world.add("waits", [2], NEW)
    world.step()
    world.finish_load(NEW)
    arrived = time.monotonic()
    world.run()
    timings = world.prompts["waits"].timings
    request = world._requests["waits"]
    assert 0 < timings.load <= arrived - request.arrival_time
    assert timings.queue > 0


def test_previous_answers_if_it_is_here() -> None:
    world = World(auto_load=False)
    warm(world, "old")
    world.add("r", [1, 2], NEW, **PREVIOUS)
    world.step()
    assert world.prompts["r"].fell_back
    assert world.loading == [NEW]
    world.finish_load(NEW)
    world.run()
    world.check_answers()
    world.check_nothing_held()


@pytest.mark.parametrize("first", [NEW, OLD], ids=["new", "old"])
def test_if_both_are_cold_whichever_arrives_first_answers(first: object) -> None:
    world = World(auto_load=False)
    world.add("r", [1, 2], NEW, **PREVIOUS)
    world.step()
    assert world.loading == [NEW, OLD]
    world.finish_load(NEW if first is NEW else OLD)
    world.run_until("r")
    assert world.prompts["r"].fell_back == (first is OLD)
    world.check_answers()
    world.check_nothing_held()


def test_max_cold_wait_does_not_end_the_wait_for_either_but_timeout_does() -> None:
    world = World(auto_load=False)
    now = time.monotonic()
    world.add("r", [1], NEW, max_cold_wait=0.001, deadline=now + 60, arrival_time=now, **PREVIOUS)
    world.take(world.scheduler.expire(now + 1))
    assert "r" not in world.ends
    assert world.scheduler.next_deadline(0.0) == now + 60
    world.take(world.scheduler.expire(now + 61))
    assert "timeout_ms" in str(world.error("r"))
    world.check_nothing_held()


def test_without_a_version_before_it_waits_for_the_adapter_itself() -> None:
    world = World(auto_load=False)
    world.add("r", [1], NEW, on_cold=OnCold.PREVIOUS)
    world.step()
    assert "r" not in world.ends
    world.finish_load(NEW)
    world.run()
    assert isinstance(world.ends["r"], FinishEvent)
    world.check_answers()


def test_fail_waits_as_long_as_it_may() -> None:
    world = World(auto_load=False)
    world.add("r", [1], NEW, on_cold=OnCold.FAIL, max_cold_wait=60.0)
    world.step()
    assert "r" not in world.ends
    world.finish_load(NEW)
    world.run()
    assert isinstance(world.ends["r"], FinishEvent)


def test_base_answers_for_a_set_of_which_one_is_cold() -> None:
    world = World(auto_load=False)
    warm(world, "old")
    world.add("set", [1], (AdapterUse(OLD, 0.5), AdapterUse(NEW, 0.5)), **BASE)
    world.step()
    assert world.prompts["set"].fell_back
    world.run_until("set")
    world.check_answers()
    world.check_nothing_held()


@pytest.mark.parametrize("error", [AdapterUnavailableError("gone"), InvalidAdapterError(["broken"])])
def test_adapter_that_cannot_be_loaded_is_answered_for_by_the_fallback(error: AdapterUnavailableError) -> None:
    world = World(auto_load=False)
    world.add("base", [1], NEW, max_cold_wait=60.0, **BASE)
    world.add("previous", [1], NEW, max_cold_wait=60.0, **PREVIOUS)
    world.add("nobody", [1], NEW)
    world.step()
    world.finish_load(NEW, error)
    world.step()
    assert world.loading == [OLD]
    world.finish_load(OLD)
    world.run()
    assert world.prompts["base"].fell_back
    assert world.prompts["previous"].fell_back
    assert world.error("nobody") is error
    world.check_answers()
    world.check_nothing_held()


def test_previous_that_cannot_be_loaded_leaves_the_wait_for_the_adapter_and_is_not_tried_for_ever() -> None:
    world = World(auto_load=False)
    world.add("r", [1], NEW, **PREVIOUS)
    world.step()
    world.finish_load(OLD, AdapterUnavailableError("gone"))
    world.step()
    assert world.loading == [NEW]
    world.finish_load(NEW)
    world.run()
    assert not world.prompts["r"].fell_back
    world.check_answers()
    world.check_nothing_held()


def test_neither_version_can_be_loaded() -> None:
    world = World(auto_load=False)
    world.add("r", [1], NEW, **PREVIOUS)
    world.step()
    world.finish_load(NEW, AdapterUnavailableError("new is gone"))
    world.finish_load(OLD, AdapterUnavailableError("old is gone"))
    assert str(world.error("r")) == "old is gone"
    world.check_nothing_held()


def test_previous_that_could_not_be_loaded_is_not_tried_again_when_the_adapter_cannot_either() -> None:
    world = World(auto_load=False)
    world.add("r", [1], NEW, **PREVIOUS)
    world.step()
    world.finish_load(OLD, AdapterUnavailableError("old is gone"))
    world.finish_load(NEW, AdapterUnavailableError("new is gone"))
    assert str(world.error("r")) == "new is gone"
    world.check_nothing_held()


def test_choices_of_one_answer_fall_back_together_even_if_the_adapter_arrives_between_them() -> None:
    world = World(auto_load=False)
    world.add("c0", [1, 2], NEW, answer_id="c", max_tokens=20, **BASE)
    world.step()
    world.finish_load(NEW)
    world.add("c1", [1, 2], NEW, answer_id="c", **BASE)
    world.add("other", [1, 2], NEW, **BASE)
    world.run()
    assert [world.prompts[name].fell_back for name in ("c0", "c1", "other")] == [True, True, False]
    world.check_answers()
    world.check_nothing_held()


def test_choice_does_not_fall_back_once_another_ran_with_the_adapter() -> None:
    world = World(auto_load=False, max_num_seqs=1)
    warm(world, "new")
    world.add("c0", [1], NEW, answer_id="c", **BASE)
    world.step()
    world.add("c1", [1], NEW, answer_id="c", **BASE)
    world.scheduler.abort("c0")
    world.residency.host.drop(NEW.digest)
    world.residency._drop(world.residency.slots.remove(NEW.digest), EvictionReason.ADMIN)
    world.step()
    assert "c1" not in world.prompts
    world.finish_load(NEW)
    world.run()
    assert not world.prompts["c1"].fell_back
    world.check_answers()
    world.check_nothing_held()


def test_prefix_of_the_base_is_not_taken_for_the_adapters() -> None:
    """Keys made for the adapter while it waited must not name what the base model computed in its place."""
    world = World(auto_load=False, max_num_seqs=2, num_blocks=8)
    prompt = list(range(13))
    world.add("holds blocks", list(range(100, 117)), max_tokens=6)
    world.step()
    world.add("falls back", prompt, NEW, max_cold_wait=60.0, **BASE)
    world.step()
    assert world.scheduler.waiting[0].block_keys, "the keys must have been made before the fall"
    world.take(world.scheduler.expire(time.monotonic() + 61))
    world.run_until("falls back")
    assert world.prompts["falls back"].fell_back
    world.finish_load(NEW)
    world.add("adapter", prompt, NEW)
    world.run()
    world.add("base", prompt)
    world.run()
    assert world.prompts["adapter"].num_cached_tokens == 0
    assert world.prompts["base"].num_cached_tokens == 12
    world.check_answers()
    world.check_nothing_held()


@given(st.data())
def test_any_mix_of_cold_policies_ends_with_right_answers_and_nothing_held(data: st.DataObject) -> None:
    """Loads finish, fail or dawdle as they like; aborts, few slots and little memory: no leak and no standstill."""
    world = World(
        auto_load=False,
        num_blocks=data.draw(st.integers(12, 40), "blocks"),
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(1, 4), "rows"),
        max_loras=data.draw(st.integers(2, 3), "slots"),
        adapter_host_memory=data.draw(st.integers(20, 60), "host bytes"),
    )
    aborted = set()
    for index in range(data.draw(st.integers(1, 12), "requests")):
        name, before = data.draw(st.lists(st.sampled_from("abcde"), min_size=2, max_size=2, unique=True))
        on_cold = data.draw(st.sampled_from(OnCold))
        fallback = {OnCold.BASE: (), OnCold.PREVIOUS: (AdapterUse(adapter(before)),)}.get(on_cold)
        patience = data.draw(st.sampled_from([None, 0.0, 1e9]))
        group = data.draw(st.sampled_from(["", name + before + on_cold]))
        world.add(
            f"r{index}", data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20)), adapter(name),
            max_tokens=data.draw(st.integers(1, 10)), on_cold=on_cold, fallback=fallback, max_cold_wait=patience,
            answer_id=group,
        )  # fmt: skip
        for _ in range(data.draw(st.integers(0, 3))):
            if world.loading and data.draw(st.booleans()):
                error = AdapterUnavailableError("gone") if data.draw(st.integers(0, 4)) == 0 else None
                world.finish_load(data.draw(st.sampled_from(world.loading)), error)
            world.step()
        if data.draw(st.integers(0, 5)) == 0 and f"r{index}" not in world.ends:
            aborted.add(f"r{index}")
            world.scheduler.abort(f"r{index}")
    for _ in range(2000):
        if set(world.ends) | aborted == set(world.tokens):
            break
        if world.loading:
            world.finish_load(world.loading[0])
        world.step()
    assert set(world.ends) == set(world.tokens) - aborted
    world.check_answers()
    world.check_nothing_held()
    assert not world.scheduler._cold_start._answers
