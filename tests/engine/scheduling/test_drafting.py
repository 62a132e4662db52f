"""Drafts in the engine: the same answers as without them, in fewer steps, and nothing taken from anybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.batch import Batch, MemoryPlan, NextToken, RowOutput
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.messages import ErrorEvent, FinishEvent
from lora_serve.core.model_spec import ONE_ROPE, LongRope
from lora_serve.core.request import AdapterUse, FinishReason
from tests.engine.fake_constraints import TOO_COMPLEX, FakeConstraints, grammar
from tests.engine.fake_runner import next_token
from tests.engine.world import VirtualClock, World, adapter


def cycle(key: object, tokens: list[int]) -> int:
    """The token behind the newest one in a round of ten: what an answer that repeats itself looks like."""
    return (tokens[-1] + 1) % 10


def mostly_cycle(key: object, tokens: list[int]) -> int:
    """The round of ten with a token out of place now and then, each adapter in places of its own."""
    wish = next_token(key, tokens)
    return wish % 10 if wish % 7 == 0 else cycle(key, tokens)


USES = (
    (AdapterUse(adapter("a")),),
    (AdapterUse(adapter("b")),),
    (AdapterUse(adapter("a"), 0.5), AdapterUse(adapter("b"), 1.5)),
    (AdapterUse(adapter("b"), 0.5, 3), AdapterUse(adapter("c"))),
)  # one adapter, two together, and two of which one acts from the fourth token on


def run_one(speculate: str, **fields: Any) -> World:
    world = World(next_token=cycle, speculate=speculate, max_num_batched_tokens=64)
    world.add("a", [*range(10), 0, 1], **{"max_tokens": 40, **fields})
    world.run()
    world.check_nothing_held()
    return world


def test_answer_that_repeats_its_prompt_takes_fewer_steps() -> None:
    plain, drafted = run_one("off"), run_one("4")
    assert drafted.tokens == plain.tokens
    assert len(plain.runner.batches) == 40
    assert len(drafted.runner.batches) <= 10  # a token of the prompt, then five in each step
    stats = drafted.engine.stats().speculation
    assert stats.num_drafts == sum(row.num_draft > 0 for batch in drafted.runner.batches for row in batch.rows)
    assert stats.num_accepted == drafted.runner.num_accepted == sum(stats.accepted_by_place)
    assert stats.num_drafted >= stats.num_accepted >= 30


def test_draft_is_never_longer_than_what_the_request_may_still_have() -> None:
    world = run_one("16", max_tokens=7)
    assert len(world.tokens["a"]) == 7
    assert all(row.start + len(row.token_ids) <= 12 + 6 for batch in world.runner.batches for row in batch.rows)


def test_draft_stays_within_the_longest_sequence() -> None:
    world = World(next_token=cycle, speculate="16", max_model_len=20, max_num_batched_tokens=64)
    world.add("a", [*range(10), 0, 1], max_tokens=100)
    world.run()
    assert len(world.tokens["a"]) == 8
    assert all(row.start + len(row.token_ids) < 20 for batch in world.runner.batches for row in batch.rows)


def test_tokens_behind_a_stop_are_dropped() -> None:
    world = run_one("8", stop_token_ids=(6,), min_tokens=10)
    assert world.tokens["a"] == [2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    end = world.ends["a"]
    assert isinstance(end, FinishEvent)
    assert end == FinishEvent("a", FinishReason.STOP, 6)


def test_nobody_is_preempted_and_no_prompt_waits_for_a_draft() -> None:
    world = World(
        num_blocks=12, next_token=cycle, speculate="16", max_num_batched_tokens=20, enable_prefix_caching=False
    )
    world.add("a", [*range(10), 0, 1], max_tokens=12)
    world.step()
    world.step()
    world.add("b", list(range(20)), max_tokens=4)
    world.step()
    last = world.runner.batches[-1]
    assert sum(len(row.token_ids) - row.num_draft for row in last.rows) == 20, "the prompt had all that was left"
    assert last.num_drafted == 0
    world.run()
    assert world.scheduler.num_preemptions == 0
    world.check_answers()
    world.check_nothing_held()


def test_draft_takes_free_blocks_only_and_gives_back_those_of_wrong_guesses() -> None:
    world = World(num_blocks=5, next_token=cycle, speculate="16", block_size=4)
    world.add("a", [*range(10), 0, 1], max_tokens=9)
    world.run()
    assert world.scheduler.num_preemptions == 0
    world.check_answers()
    world = World(num_blocks=20, next_token=mostly_cycle, speculate="16", block_size=4, max_num_batched_tokens=64)
    world.add("a", [*range(10), 0, 1], max_tokens=40)
    while world.step() and world.scheduler.running:
        (sequence,) = world.scheduler.running
        assert len(sequence.blocks) <= -(-(sequence.num_computed + 1) // 4)
    world.check_answers()


def test_wrong_guesses_end_and_right_ones_begin_again() -> None:
    """`auto` learns that guesses fail, without running them, and notices when they come true again."""
    is_random = True

    def token(key: object, tokens: list[int]) -> int:
        return next_token(key, tokens) % 10 if is_random else cycle(key, tokens)

    clock = VirtualClock()
    world = World(num_blocks=400, next_token=token, speculate="auto", max_model_len=1000, clock=clock)
    run = world.runner.run

    def timed(batch: Batch) -> list[RowOutput]:
        clock.now += 5e-3 + 2e-5 * batch.num_tokens
        return run(batch)

    world.engine.execution.runner.run = timed  # type: ignore[method-assign]
    world.add("a", [*range(10), 0, 1], max_tokens=900)
    for _ in range(300):
        world.step()
    before = world.engine.stats().speculation
    for _ in range(100):
        world.step()
    after = world.engine.stats().speculation
    assert after.num_accepted - before.num_accepted < 40
    is_random = False
    for _ in range(150):
        world.step()
    assert world.engine.stats().speculation.num_accepted > after.num_accepted + 60


def test_answers_of_one_tenant_leave_no_guess_for_another() -> None:
    """How fast an answer comes would tell what others were answered."""
    world = World(next_token=lambda key, tokens: (tokens[-1] * 7 + 11) % 1999, speculate="8")
    for request_id, tenant in (("a", "one"), ("b", "one"), ("c", "two")):
        world.add(request_id, [5], max_tokens=16, tenant=tenant)
        accepted = world.runner.num_accepted
        world.run()
        found = world.runner.num_accepted - accepted
        assert (found > 8) == (request_id == "b"), request_id


@pytest.mark.parametrize("uses", [(), adapter("a")], ids=["base model", "shared adapter"])
def test_texts_leave_no_guess_in_another_scope_or_under_another_digest(uses: Any) -> None:
    """Another tenant's, or a tenant's that was made again under its old name; the adapter's next version."""
    world = World(next_token=lambda key, tokens: (tokens[-1] * 7 + 11) % 1999, speculate="8")
    scopes = ({"tenant": "one"}, {"tenant": "two"}, {"tenant": "one", "cache_scope": "one since 7"}, {"tenant": "one"})
    drafted = []
    for number, scope in enumerate(scopes):
        before = world.engine.stats().speculation.num_drafted
        world.add(f"r{number}", [5], uses, max_tokens=16, **scope)
        world.run()
        drafted.append(world.engine.stats().speculation.num_drafted - before)
    assert drafted[:3] == [0, 0, 0]
    assert drafted[3] > 8
    world.add("next", [5], adapter("a-2"), max_tokens=16, tenant="one")
    world.run()
    assert world.engine.stats().speculation.num_drafted == sum(drafted)


def drafts_of_two(others: Callable[[World], None]) -> list[tuple[int, int]]:
    """Where the drafts of a tenant's rows stand and how long they are, after another tenant's requests."""
    world = World(next_token=cycle, num_blocks=400, max_model_len=400, clock=VirtualClock(), speculate="auto")
    others(world)
    num_before = len(world.runner.batches)
    for request_id in ("x", "y", "z"):
        world.add(request_id, [*range(10), 0, 1], tenant="two", max_tokens=40)
        world.run()
    return [(row.start, row.num_draft) for batch in world.runner.batches[num_before:] for row in batch.rows]


@pytest.mark.parametrize("repeats", [True, False])
def test_drafts_of_a_tenant_are_the_same_whatever_another_sent(repeats: bool) -> None:
    """Though both use the base model alone: guesses of the other's text come true every time, or never."""

    def others(world: World) -> None:
        world.runner.next_token = lambda key, tokens: cycle(key, tokens) if repeats else next_token(key, tokens) % 10
        for index in range(8):
            world.add(f"a{index}", [*range(10), 0, 1], tenant="one", max_tokens=300)
            world.run()
        world.runner.next_token = cycle

    alone = drafts_of_two(lambda world: None)
    assert sum(num_draft for _, num_draft in alone) > 30
    assert drafts_of_two(others) == alone


def test_figures_of_an_adapter_are_summed_over_tenants_and_named() -> None:
    world = World(next_token=cycle, speculate="4", max_num_batched_tokens=64)
    for request_id, tenant in (("a", "one"), ("b", "two")):
        world.add(request_id, [*range(10), 0, 1], adapter("a"), tenant=tenant, max_tokens=40)
        world.run()
    stats = world.engine.stats().speculation
    (one,) = stats.adapters
    assert (one.digests, one.names) == (("sha256:a",), (world.engine.stats().slots[0].name,))
    assert (one.num_drafted, one.num_accepted) == (stats.num_drafted, stats.num_accepted)
    assert one.acceptance == round(stats.num_accepted / stats.num_drafted, 3)
    assert (stats.mode, stats.most) == ("4", 4)


def test_draft_of_a_row_that_memory_has_no_room_for_is_left_out() -> None:
    world = World(next_token=cycle, speculate="8")
    world.runner.max_tokens = 12
    world.add("a", [*range(10), 0, 1], max_tokens=30)
    world.add("b", [*range(10), 0, 2], max_tokens=30)
    world.run()
    world.check_answers()
    world.check_nothing_held()


def test_grammar_keeps_its_answers() -> None:
    steps = [[1, 2], [2, 3], [3], [3, 4, 5], [4, 6], [5, 6], [6, 7], [7], [8], [0, 8]]
    for speculate in ("off", "8"):
        world = World(next_token=cycle, speculate=speculate, constraints=FakeConstraints())
        world.add("a", [*range(10), 0], max_tokens=20, grammar=grammar(*steps))
        world.run()
        world.check_answers()
        assert isinstance(world.ends["a"], FinishEvent)
        assert (world.runner.num_accepted > 0) == (speculate == "8")


def test_guess_behind_a_token_that_the_grammar_follows_with_forced_ones_is_dropped() -> None:
    """As from a runner that drew a token where the engine has put those that leave no choice."""
    world = World(next_token=cycle, speculate="8", constraints=FakeConstraints())
    run = world.runner.run

    def eager(batch: Batch) -> list[RowOutput]:
        outputs = run(batch)
        return [replace(output, following=(*output.following, NextToken(777))) for output in outputs]

    world.engine.execution.runner.run = eager  # type: ignore[method-assign]
    world.add("a", [*range(10), 0], max_tokens=20, grammar=grammar([1, 2], [2], [3], [4, 5], [5], [6, 7], [7]))
    world.run()
    assert 777 not in world.tokens["a"]
    assert isinstance(world.ends["a"], FinishEvent)
    world.check_answers()


def test_grammar_that_fails_at_a_guess_ends_its_row_once() -> None:
    world = World(next_token=cycle, speculate="8", constraints=FakeConstraints())
    steps = [[1, 2], [2, 3], [3, TOO_COMPLEX], [4, 5], [5, 6], [6, 7]]
    world.add("a", [*range(10), 0], max_tokens=20, grammar=grammar(*steps))
    world.add("b", [*range(10), 0, 1], max_tokens=20)
    world.run()
    assert isinstance(world.error("a"), InvalidRequestError)
    assert world.tokens["b"] == world.expected("b")
    world.check_nothing_held()


@pytest.mark.parametrize("speculate", ["auto", "3", "16"])
@given(data=st.data())
def test_any_traffic_is_answered_as_without_drafts(speculate: str, data: st.DataObject) -> None:
    """Sets of adapters, choices of one prompt, stops, grammars, aborts, tight memory: the same tokens and ends."""
    settings = {
        "num_blocks": data.draw(st.integers(12, 40), "blocks"),
        "max_num_seqs": data.draw(st.integers(1, 6), "rows"),
        "max_num_batched_tokens": data.draw(st.integers(16, 60), "tokens"),
        "policy": data.draw(st.sampled_from(["fcfs", "fair", "priority"]), "policy"),
        "long_rope": data.draw(st.sampled_from([ONE_ROPE, LongRope(17, True)]), "long rope"),
    }
    short_of = data.draw(st.sampled_from([None, 5, 20]), "most tokens that the device has memory for")
    plan = MemoryPlan(num_host_blocks=data.draw(st.sampled_from([0, 10]), "host blocks"))
    script: list[tuple[Any, ...]] = []
    for index in range(data.draw(st.integers(1, 8), "requests")):
        prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=20))
        sampling: dict[str, Any] = {
            "max_tokens": data.draw(st.integers(1, 18)),
            "min_tokens": data.draw(st.sampled_from([0, 0, 3])),
            "stop_token_ids": data.draw(st.sampled_from([(), (3,), (8, 9)])),
            "prompt_logprobs": data.draw(st.sampled_from([None, None, 0])),
            "priority": data.draw(st.integers(0, 1)),
        }
        if data.draw(st.integers(0, 3)) == 0:
            steps = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=12))
            sampling |= {"grammar": grammar(*steps), "stop_token_ids": (), "max_tokens": 20}
        uses = data.draw(st.sampled_from([(), *USES]), "adapters")
        abort = data.draw(st.integers(0, 7)) == 0
        num_choices = data.draw(st.sampled_from([1, 1, 2, 4]), "n")
        script.append((f"r{index}", num_choices, prompt, uses, sampling, data.draw(st.integers(0, 4)), abort))
    worlds = []
    for setting in ("off", speculate):
        world = World(
            next_token=mostly_cycle, speculate=setting, max_model_len=40, memory=plan, constraints=FakeConstraints(),
            **settings,
        )  # fmt: skip
        world.runner.max_tokens = short_of
        for request_id, num_choices, prompt, uses, sampling, num_steps, abort in script:
            for choice in range(1, num_choices):
                world.add(f"{request_id}-{choice}", prompt, uses, **sampling)
            world.add(request_id, prompt, uses, **sampling)
            for _ in range(num_steps):
                world.step()
            if abort and request_id not in world.ends:
                world.scheduler.abort(request_id)
        world.run()
        world.check_nothing_held()
        worlds.append(world)
    plain, drafted = worlds
    for request_id in set(plain.ends) & set(drafted.ends):
        assert drafted.tokens[request_id] == plain.tokens[request_id]
        assert drafted.ends[request_id] == plain.ends[request_id]
    assert not any(isinstance(end, ErrorEvent) for end in drafted.ends.values())
