"""Rows that obey a grammar: they wait for it beside the others, and their forced tokens are as good as sampled ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import InternalError, InvalidRequestError, RequestTimeoutError
from lora_serve.core.messages import ErrorEvent, FinishEvent, TokenEvent, TokenLogprobs
from lora_serve.core.request import FinishReason
from lora_serve.engine.batcher import running_of
from tests.engine.fake_constraints import TOO_COMPLEX, FakeConstraints, grammar
from tests.engine.world import EOS, VirtualClock, World, adapter

FREE = range(100, 300)


def world_of(num_blocks: int = 64, **settings: Any) -> World:
    return World(num_blocks, constraints=settings.pop("constraints", None) or FakeConstraints(), **settings)


def lengths(world: World, request_id: str) -> list[int]:
    """The tokens that each step ran of a request's row; requests are numbered as they came."""
    index = list(world._requests).index(request_id)
    return [len(row.token_ids) for batch in world.runner.batches for row in batch.rows if row.sequence_id == index]


def test_tokens_without_a_choice_run_as_one_chunk_and_the_answer_is_the_same() -> None:
    rule = grammar(FREE, [7], [8], [9], FREE, FREE, [11], [EOS])
    for can_force in (True, False):
        world = world_of(constraints=FakeConstraints(can_force))
        world.add("a", [1, 2, 3], grammar=rule, max_tokens=50)
        world.run()
        world.check_answers()
        assert world.ends["a"] == FinishEvent("a", FinishReason.STOP, EOS)
        assert world.tokens["a"][1:4] == [7, 8, 9]
        expected = [3, 4, 1] if can_force else [3, *[1] * 7]
        assert lengths(world, "a") == expected
        assert world.engine.stats().num_forced == (5 if can_force else 0)
        world.check_nothing_held()


def test_complete_output_ends_at_once() -> None:
    world = world_of()
    world.add("sampled", [1], grammar=grammar(FREE, FREE), max_tokens=50)
    world.add("forced", [1], grammar=grammar(FREE, [7], [8]), max_tokens=50)
    world.add("at its greatest length", [1], grammar=grammar(FREE, [7], [8]), max_tokens=3)
    world.add("told to go on", [1], grammar=grammar(FREE, [EOS]), max_tokens=50, min_tokens=9, ignore_eos=True)
    world.run()
    world.check_answers()
    for request_id in ("sampled", "forced", "at its greatest length"):
        assert world.ends[request_id] == FinishEvent(request_id, FinishReason.STOP), request_id
    assert world.ends["told to go on"] == FinishEvent("told to go on", FinishReason.STOP, EOS)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_forced_tokens_are_cut_at_the_greatest_number(max_tokens: int) -> None:
    world = world_of()
    world.add("a", [1], grammar=grammar(FREE, [7], [8], [9], FREE, FREE), max_tokens=max_tokens)
    world.run()
    world.check_answers()
    assert world.ends["a"] == FinishEvent("a", FinishReason.LENGTH)
    assert len(world.tokens["a"]) == max_tokens
    world.check_nothing_held()


def test_forced_tokens_are_cut_at_the_model_s_length() -> None:
    world = world_of(max_model_len=20)
    world.add("a", [1] * 10, grammar=grammar(FREE, *[[7]] * 50), max_tokens=200)
    world.run()
    assert world.ends["a"] == FinishEvent("a", FinishReason.LENGTH)
    assert len(world.tokens["a"]) == 10


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_forced_stop_token_ends_the_row_once_it_may(min_tokens: int) -> None:
    world = world_of()
    rule = grammar(FREE, [7], [8], [7], FREE)
    world.add("a", [1], grammar=rule, max_tokens=50, stop_token_ids=(7,), min_tokens=min_tokens)
    world.run()
    assert world.ends["a"] == FinishEvent("a", FinishReason.STOP, 7)
    assert world.tokens["a"][1:] == ([7] if min_tokens == 0 else [7, 8, 7])


def test_forced_tokens_are_certain() -> None:
    world = world_of()
    events: list[TokenEvent] = []
    world.add("a", [1], grammar=grammar(FREE, [7], [8]), logprobs=2, max_tokens=50)
    world.add("b", [1], grammar=grammar(FREE, [7], [8]), logprobs=0, max_tokens=50)
    world.add("c", [1], grammar=grammar(FREE, [7], [8]), max_tokens=50)
    for request_id in list(world.constraints.compiling):
        world.finish_grammar(request_id)
    for _ in range(2):
        events += [event for event in world.engine.step()[1] if isinstance(event, TokenEvent)]
    found = {key: [e.logprobs for e in events if e.request_id == key][1:] for key in "abc"}
    assert found["a"] == [TokenLogprobs(token, 0.0, 1, ((token, 0.0),)) for token in (7, 8)]
    assert found["b"] == [TokenLogprobs(token, 0.0, 1, ()) for token in (7, 8)]
    assert found["c"] == [None, None]


def test_chunk_of_forced_tokens_leaves_the_others_their_token() -> None:
    """A step of 16 tokens: the row with 40 forced ones takes what the other rows leave."""
    world = world_of(max_num_batched_tokens=16, num_blocks=200)
    for name in "abc":
        world.add(name, [ord(name)], max_tokens=30)
    world.step()
    world.add("long", [1], grammar=grammar(FREE, *[[7]] * 40, FREE, FREE), max_tokens=60)
    for _ in range(8):
        before = {name: len(world.tokens[name]) for name in "abc"}
        world.step()
        assert all(len(world.tokens[name]) == before[name] + 1 for name in "abc")
    assert lengths(world, "long")[:5] == [1, 13, 13, 13, 2]
    world.run()
    world.check_answers()


def test_nobody_waits_for_a_grammar_but_its_own_request() -> None:
    world = world_of(auto_load=False)
    world.add("slow", [1], grammar=grammar(FREE, [7]), max_tokens=9)
    world.add("base", [2], max_tokens=9)
    while world.step():
        pass
    assert set(world.ends) == {"base"}
    assert world.engine.stats().num_waiting == 1
    assert not world.step()
    world.finish_grammar("slow")
    world.run_until("slow")
    world.check_answers()
    world.check_nothing_held()


def test_grammar_and_adapter_are_waited_for_at_the_same_time() -> None:
    world = world_of(auto_load=False)
    world.add("a", [1], adapter("x"), grammar=grammar(FREE, FREE), max_tokens=9)
    assert not world.step()
    assert [ref.name for ref in world.loading] == ["x"]
    assert list(world.constraints.compiling) == ["a"]
    world.finish_load(world.loading[0])
    assert not world.step()
    world.finish_grammar("a")
    world.run_until("a")
    world.check_answers()


def test_grammar_that_cannot_be_compiled_ends_its_request_before_anything_else() -> None:
    world = world_of(auto_load=False)
    world.add("bad", [1], grammar=grammar(FREE))
    world.step()
    world.finish_grammar("bad", InvalidRequestError("what is this?"))
    assert str(world.error("bad")) == "what is this?"
    assert "bad" not in world.prompts
    assert not world.tokens["bad"]
    world.check_nothing_held()


def test_end_of_a_compilation_comes_too_late() -> None:
    clock = VirtualClock()
    world = world_of(auto_load=False, clock=clock)
    world.add("left", [1], grammar=grammar(FREE))
    world.add("late", [1], grammar=grammar(FREE), deadline=clock.now + 1)
    world.scheduler.abort("left")
    clock.now += 2
    world.step()
    assert isinstance(world.error("late"), RequestTimeoutError)
    world.finish_grammar("left")
    world.finish_grammar("late", InvalidRequestError("no"))
    assert list(world.ends) == ["late"]
    world.check_nothing_held()


def test_server_without_grammars_says_so() -> None:
    world = World()
    world.add("a", [1], grammar=grammar(FREE))
    assert isinstance(world.error("a"), InvalidRequestError)
    world.check_nothing_held()


def test_grammars_are_remembered_for_one_life_of_a_tenant() -> None:
    world = world_of()
    world.add("a", [1], grammar=grammar(FREE), tenant="acme")
    world.add("b", [1], grammar=grammar(FREE), tenant="acme", cache_scope="acme since 7")
    assert world.constraints.tenants == {"a": "acme", "b": "acme since 7"}


def test_grammar_that_fails_ends_its_row_alone() -> None:
    world = world_of()
    world.add("bad", [1], grammar=grammar(FREE, [7], [*FREE, TOO_COMPLEX], FREE), max_tokens=9)
    world.add("good", [2], grammar=grammar(FREE, [7], FREE, FREE), max_tokens=9)
    world.add("base", [3], max_tokens=9)
    world.run()
    assert isinstance(world.error("bad"), InvalidRequestError)
    world.check_answers()
    assert {"good", "base"} == {key for key, end in world.ends.items() if isinstance(end, FinishEvent)}
    world.check_nothing_held()


@pytest.mark.parametrize("where", ["advance", "forced"])
def test_grammar_in_which_there_is_a_bug_ends_its_row_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of()
    world.add("bad", [1], grammar=grammar(FREE, FREE, FREE), max_tokens=9)
    world.add("good", [2], grammar=grammar(FREE, FREE, FREE), max_tokens=9)
    world.add("base", [3], max_tokens=9)
    world.step()
    monkeypatch.setattr(world.constraints.made["bad"], where, lambda *_: 1 / 0)
    world.run()
    error = world.error("bad")
    assert isinstance(error, InternalError)
    assert "division" not in str(error)
    world.check_answers()
    assert {"good", "base"} == {key for key, end in world.ends.items() if isinstance(end, FinishEvent)}
    world.check_nothing_held()


def test_row_that_runs_again_does_not_advance_twice() -> None:
    """First out of memory in every size but one token, then a neighbour that makes the whole batch fail."""
    world = world_of()
    rule = grammar(FREE, [7], [8], [9], FREE, FREE)
    world.add("a", [1, 2], grammar=rule, max_tokens=9)
    world.add("b", [3, 4], grammar=rule, max_tokens=9)
    world.runner.max_tokens = 1
    world.run()
    world.runner.max_tokens = None
    world.add("c", [1, 2], grammar=rule, max_tokens=9)
    world.add("bomb", [667], max_tokens=9)
    world.run()
    world.check_answers()
    assert {"a", "b", "c"} == {key for key, end in world.ends.items() if isinstance(end, FinishEvent)}
    assert isinstance(world.error("bomb"), InternalError)
    world.check_nothing_held()


def test_ended_engine_ends_requests_whose_grammars_are_compiling() -> None:
    world = world_of(auto_load=False)
    world.add("a", [1], grammar=grammar(FREE))
    world.take(list(world.scheduler.fail_all(InternalError("a bug"))))
    assert isinstance(world.ends["a"], ErrorEvent)
    world.finish_grammar("a")
    assert not world.step()


@given(st.data())
def test_any_traffic_with_and_without_grammars_is_answered_right(data: st.DataObject) -> None:
    """Preemption, chunks, known prefixes, short memory and aborts: a forced token is what sampling would have given."""
    world = world_of(
        num_blocks=data.draw(st.integers(12, 40), "blocks"),
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(1, 6), "rows"),
        max_num_batched_tokens=data.draw(st.integers(16, 40), "tokens"),
        max_loras=2,
        enable_prefix_caching=data.draw(st.booleans(), "prefix caching"),
        swap_space=data.draw(st.sampled_from(["0", "1MiB"]), "swap space"),
    )
    step = st.sampled_from([[7], [8], [9], list(FREE), [3, 4]])
    aborted = set()
    for index in range(data.draw(st.integers(1, 12), "requests")):
        rule = data.draw(st.one_of(st.none(), st.lists(step, min_size=1, max_size=18)))
        name = data.draw(st.sampled_from([None, "a", "b", "c"]))
        world.add(
            f"r{index}", data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20)), name and adapter(name),
            grammar=rule and grammar(*rule), max_tokens=data.draw(st.integers(1, 18)),
            prompt_logprobs=data.draw(st.sampled_from([None, None, 0])),
        )  # fmt: skip
        world.runner.max_tokens = data.draw(st.sampled_from([None, None, 5]))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
        victim = f"r{data.draw(st.integers(0, index))}"
        if data.draw(st.integers(0, 5)) == 0 and victim not in world.ends:
            aborted.add(victim)
            world.scheduler.abort(victim)
    world.run()
    world.check_answers()
    assert set(world.ends) == set(world.tokens) - aborted
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    world.check_nothing_held()


def test_row_with_forced_tokens_counts_as_one_that_decodes() -> None:
    """Until it is preempted: what is computed again is like a prompt."""
    world = world_of()
    world.add("a", [1] * 10, grammar=grammar(FREE, *[[7]] * 9, FREE, FREE), max_tokens=50)
    world.add("b", [2] * 3, max_tokens=50)
    world.add("c", [3] * 40, max_tokens=50)
    world.step()
    by_name = {sequence.request.request_id: sequence for sequence in world.scheduler.running}
    assert {name: sequence.num_remaining for name, sequence in by_name.items()} == {"a": 10, "b": 1, "c": 21}
    load = running_of(world.scheduler.running)
    assert (load.num_rows, load.num_decoding, load.num_started) == (3, 2, 19)
    order = sorted(by_name, key=lambda name: by_name[name].step_order)
    assert order == ["b", "a", "c"]
    by_name["a"].num_computed = 0
    assert not by_name["a"].is_decoding


def test_compilation_is_neither_queueing_nor_the_time_to_the_first_token() -> None:
    """It opens no window of the batcher, and targets of latency do not see it."""
    clock = VirtualClock()
    world = world_of(auto_load=False, clock=clock, batch_wait_ms=1000)
    world.add("a", [1], grammar=grammar(FREE, FREE), max_tokens=9)
    assert world.scheduler.next_deadline(clock.now) is None
    clock.now += 100
    world.finish_grammar("a")
    assert world.scheduler.next_deadline(clock.now) == clock.now + 1
    assert not world.step()
    clock.now += 1
    world.run_until("a")
    ttft = world.scheduler.batcher.stats([]).ttft_p95
    assert ttft is not None
    assert ttft <= 1.001
