"""Blocks that are found again: by whom, by whom not, and what is left of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import InternalError, NumericalError
from lora_serve.core.messages import FinishEvent
from lora_serve.core.request import AdapterUse, InferenceRequest
from lora_serve.engine.blocks import BlockManager, BlockTables
from lora_serve.engine.prefix_cache import PrefixCache, acting_in
from lora_serve.engine.sequence import Sequence
from tests.engine.fake_runner import EXPLOSION, POISON
from tests.engine.world import World, adapter

PROMPT = list(range(10, 31))  # 21 tokens: five full blocks of 4 and one token


def use(name: str, start: int = 0, scale: float = 1.0) -> AdapterUse:
    return AdapterUse(adapter(name), scale, start)


def cached(world: World, request_id: str) -> int:
    return world.prompts[request_id].num_cached_tokens


def check_tables(world: World) -> None:
    """Who uses a block, and what is known, as an outsider counts it."""
    (blocks,) = world.scheduler._blocks.kinds
    users = Counter(block for sequence in world.scheduler.running for block in sequence.blocks)
    assert all(blocks._num_users[block] == users[block] for block in range(1, blocks.num_blocks + 1))
    assert set(blocks._free) == set(range(1, blocks.num_blocks + 1)) - set(users)
    assert {block: key for key, block in blocks._by_key.items()} == blocks._key_of
    assert set(blocks._parent_of) <= set(blocks._by_key)


def run_one(world: World, request_id: str, prompt: list[int], *uses: AdapterUse, tenant: str = "default") -> int:
    """Its cached tokens."""
    world.add(request_id, prompt, uses, tenant=tenant, max_tokens=3)
    world.run()
    world.check_answers()
    check_tables(world)
    return cached(world, request_id)


def test_second_request_computes_only_what_the_first_did_not() -> None:
    world = World()
    assert run_one(world, "cold", PROMPT) == 0
    before = world.runner.num_tokens_run
    assert run_one(world, "warm", PROMPT) == 20
    assert world.runner.num_tokens_run - before == 1 + 2
    assert run_one(world, "longer", [*PROMPT, 7, 7, 7, 7]) == 20
    assert run_one(world, "other tail", [*PROMPT[:9], 7, 7, 7, 7]) == 8
    assert run_one(world, "other head", [7, *PROMPT[1:]]) == 0
    stats = world.engine.stats()
    assert stats.num_prefix_queries == 21 + 21 + 25 + 13 + 21
    assert stats.num_prefix_hits == 20 + 20 + 8
    world.check_nothing_held()


def test_prompt_that_is_known_whole_still_computes_its_last_block_in_one_of_its_own() -> None:
    world = World()
    run_one(world, "cold", PROMPT[:8])
    assert run_one(world, "warm", PROMPT[:8]) == 4
    assert run_one(world, "warm again", PROMPT[:8]) == 4


def test_answers_are_found_again_as_the_next_turns_prompt() -> None:
    world = World()
    run_one(world, "first", PROMPT)
    turn = [*PROMPT, *world.tokens["first"], 5, 5]
    assert run_one(world, "second", turn) == 20
    world.add("long", PROMPT, max_tokens=12)
    world.run()
    turn = [*PROMPT, *world.tokens["long"], 5]
    assert run_one(world, "third", turn) == 32, "21 + 12 tokens, of which the last was never computed"


@pytest.mark.parametrize(
    "other",
    [(), (use("b"),), (use("a", scale=0.5),), (use("a"), use("b")), (use("a", start=3),)],
    ids=["base", "another adapter", "another scale", "one more adapter", "a later start"],
)
def test_blocks_of_another_identity_are_never_read(other: tuple[AdapterUse, ...]) -> None:
    world = World()
    run_one(world, "cold", PROMPT, use("a"))
    assert run_one(world, "other", PROMPT, *other) == 0
    assert run_one(world, "same", PROMPT, use("a")) == 20


def test_order_of_composed_adapters_does_not_matter() -> None:
    world = World()
    run_one(world, "cold", PROMPT, use("a", scale=0.5), use("b", scale=0.25))
    assert run_one(world, "turned", PROMPT, use("b", scale=0.25), use("a", scale=0.5)) == 20
    assert run_one(world, "swapped", PROMPT, use("a", scale=0.25), use("b", scale=0.5)) == 0


def test_scopes_of_one_tenant_share_nothing() -> None:
    """A tenant that was deleted and made again under the same name."""
    world = World()
    cached_tokens = []
    for number, scope in enumerate(("first", "second", "first")):
        world.add(f"r{number}", PROMPT, tenant="acme", cache_scope=scope, max_tokens=3)
        world.run()
        cached_tokens.append(cached(world, f"r{number}"))
    assert cached_tokens == [0, 0, 20]


def test_tenants_share_nothing() -> None:
    world = World()
    run_one(world, "ours", PROMPT, tenant="acme")
    assert run_one(world, "theirs", PROMPT, tenant="pulse") == 0
    assert run_one(world, "ours again", PROMPT, tenant="acme") == 20


def test_activated_adapter_base_and_another_activated_adapter_share_what_lies_before_the_start() -> None:
    world = World()
    run_one(world, "base", PROMPT)
    assert run_one(world, "activated", PROMPT, use("a", start=14)) == 12, "block 3 holds positions 12 to 15"
    assert run_one(world, "other activated", PROMPT, use("b", start=16)) == 16
    assert run_one(world, "base again", PROMPT) == 20
    assert run_one(world, "activated again", PROMPT, use("a", start=14)) == 20


def test_base_row_finds_what_an_activated_row_wrote_before_its_start_and_nothing_behind() -> None:
    world = World()
    run_one(world, "activated", PROMPT, use("a", start=9))
    assert run_one(world, "base", PROMPT) == 8


def test_starts_within_one_block_are_told_apart() -> None:
    """Equal tokens so far, but the second prompt's invocation comes one token later."""
    world = World()
    run_one(world, "early", [9, 7, 8, 7, 1, 1], use("a", start=1))
    assert run_one(world, "late", [9, 7, 8, 7, 8, 1], use("a", start=3)) == 0


def test_identity_of_a_block_is_of_the_adapters_that_act_in_it() -> None:
    uses = (use("b", start=5), use("a", scale=0.5))
    assert acting_in(uses, 0, 4) == [("sha256:a", 0.5, 0)]
    assert acting_in(uses, 4, 8) == [("sha256:a", 0.5, 0), ("sha256:b", 1.0, 1)]
    assert acting_in(uses, 8, 12) == [("sha256:a", 0.5, 0), ("sha256:b", 1.0, 0)]


def test_keys_are_this_processs_own() -> None:
    first, second = (
        PrefixCache(BlockTables(BlockManager(8, 4)), is_enabled=True).keys_of(
            Sequence(0, InferenceRequest("r", tuple(PROMPT)), 0, PROMPT, ())
        )
        for _ in range(2)
    )
    assert len(first) == len(second) == 5
    assert not set(first) & set(second)


def test_identical_prompts_in_one_batch_both_compute_and_both_end_well() -> None:
    world = World(max_num_batched_tokens=64)
    for index in range(3):
        world.add(f"r{index}", PROMPT)
    world.run()
    world.check_answers()
    assert [cached(world, f"r{index}") for index in range(3)] == [0, 0, 0]
    check_tables(world)
    world.check_nothing_held()


def test_row_shares_the_blocks_of_one_that_still_runs() -> None:
    world = World()
    world.add("long", PROMPT, max_tokens=30)
    world.step()
    world.add("short", PROMPT, max_tokens=2)
    world.step()
    assert cached(world, "short") == 20
    assert world.engine.stats().num_free_blocks == 64 - 6 - 1
    world.scheduler.abort("long")
    check_tables(world)
    world.run()
    world.check_answers()
    world.check_nothing_held()


def test_shared_blocks_count_once_when_room_is_sought() -> None:
    world = World(num_blocks=10)
    world.add("first", PROMPT, max_tokens=8)
    world.step()
    world.add("second", PROMPT, max_tokens=2)
    world.step()
    assert len(world.scheduler.running) == 2, "6 blocks are taken; of the other's 6, five are shared"
    world.run()
    world.check_answers()


def test_blocks_revived_from_the_free_list_are_not_counted_as_free() -> None:
    world = World(num_blocks=10)
    run_one(world, "cold", PROMPT)
    world.add("other", [1] * 17, max_tokens=3)
    world.step()
    world.add("warm", PROMPT, max_tokens=2)
    world.step()
    assert len(world.scheduler.running) == 1, "of the 5 free blocks it would revive all, and needs one more"
    world.run()
    world.check_answers()
    assert world.scheduler.num_preemptions == 0
    assert cached(world, "warm") == 20


def test_longest_free_goes_first_and_a_chains_head_survives_its_tail() -> None:
    world = World(num_blocks=12)
    run_one(world, "old", PROMPT)
    run_one(world, "young", [3, *PROMPT])
    run_one(world, "pressure", [4] * 15)
    assert run_one(world, "young again", [3, *PROMPT]) == 20
    world = World(num_blocks=12)
    run_one(world, "old", PROMPT)
    run_one(world, "pressure", [4] * 31)
    assert 0 < run_one(world, "old again", PROMPT) < 20


def test_block_given_away_is_zeroed_and_one_that_is_shared_is_not() -> None:
    world = World(num_blocks=6)
    run_one(world, "cold", PROMPT)
    assert len(world.runner.batches[0].fresh_blocks) == 6
    run_one(world, "warm", PROMPT)
    warm = world.runner.batches[-3]
    assert warm.rows[0].start == 20
    assert warm.fresh_blocks == warm.rows[0].block_table[-1:]


def test_preempted_sequence_finds_its_own_blocks_again() -> None:
    world = World(num_blocks=13)
    for index in range(2):
        world.add(f"r{index}", [index] * 8, adapter("a"), max_tokens=30)
    world.run()
    world.check_answers()
    assert world.scheduler.num_preemptions > 0
    assert world.runner.num_tokens_run < 2 * (8 + 29) + 20, "most of it is not computed twice"
    assert world.engine.stats().num_prefix_queries == 16, "a preemption is not a new prompt"


@pytest.mark.parametrize(("token", "error"), [(POISON, NumericalError), (EXPLOSION, InternalError)])
def test_row_that_ended_with_an_error_leaves_no_block_behind(token: int, error: type[Exception]) -> None:
    world = World(max_num_batched_tokens=16)
    world.add("bad", [token, *PROMPT])
    world.run()
    assert isinstance(world.error("bad"), error)
    assert world.engine.stats().num_prefix_hits == 0
    assert world.scheduler._blocks.kinds[0].num_known == 0
    check_tables(world)
    world.check_nothing_held()


def test_blocks_computed_from_those_of_a_bad_row_are_forgotten_too() -> None:
    """Their writer left before anybody saw that what it read was bad."""
    world = World(num_blocks=200, max_num_batched_tokens=200, max_model_len=400)
    run_one(world, "good", [9] * 9)
    known = world.scheduler._blocks.kinds[0].num_known
    beginning = [POISON, *range(127)]
    world.add("bad", beginning * 2 + [1], prompt_logprobs=1)
    world.step()
    world.add("reader", beginning + [3] * 100)
    world.step()
    world.scheduler.abort("reader")
    assert world.scheduler._blocks.kinds[0].num_known == known + (2 * 128 + 72) // 4
    world.run()
    assert isinstance(world.error("bad"), NumericalError)
    assert world.scheduler._blocks.kinds[0].num_known == known
    check_tables(world)


def test_row_that_read_blocks_forgotten_in_this_step_publishes_nothing_behind_them() -> None:
    world = World(num_blocks=200, max_num_batched_tokens=200, max_model_len=400)
    beginning = [POISON, *range(127)]
    world.add("bad", beginning * 2, prompt_logprobs=1)
    world.step()
    world.add("reader", beginning + [3] * 100)
    world.step()
    assert isinstance(world.error("bad"), NumericalError)
    assert len(world.scheduler.running[0].blocks) == (128 + 72) // 4
    assert world.scheduler._blocks.kinds[0].num_known == 0


def test_after_a_failed_step_nothing_is_known() -> None:
    world = World()
    run_one(world, "cold", PROMPT)
    world.scheduler.fail_all(InternalError("a bug"))
    assert run_one(world, "after", PROMPT) == 0


def test_prompt_logprobs_are_computed_and_what_they_leave_is_found() -> None:
    world = World()
    run_one(world, "cold", PROMPT)
    world.add("wants all", PROMPT, prompt_logprobs=1)
    world.run()
    assert cached(world, "wants all") == 0
    assert world.engine.stats().num_prefix_queries == 21
    assert run_one(world, "warm", PROMPT) == 20


def test_without_prefix_caching_nothing_is_found() -> None:
    world = World(enable_prefix_caching=False)
    assert [run_one(world, name, PROMPT) for name in ("cold", "warm")] == [0, 0]
    stats = world.engine.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (0, 0)
    assert world.scheduler._blocks.kinds[0].num_known == 0


@given(st.data())
def test_any_traffic_over_shared_beginnings_is_answered_right(data: st.DataObject) -> None:
    """Tenants, adapters, scales, starts, aborts and tight memory; the fake runner checks every position read."""
    num_blocks = data.draw(st.integers(10, 40), "blocks")
    world = World(
        num_blocks=num_blocks,
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(1, 6), "rows"),
        max_num_batched_tokens=data.draw(st.integers(16, 40), "tokens"),
        max_loras=2,
    )
    aborted, looked_up = set(), 0
    for index in range(data.draw(st.integers(2, 14), "requests")):
        length = data.draw(st.integers(1, 24), "length")
        changed = data.draw(st.integers(0, 30), "first token that differs")
        prompt = [position if position < changed else 50 + index % 2 for position in range(length)]
        name, start = data.draw(st.sampled_from([None, "a", "b"])), data.draw(st.sampled_from([0, 0, 5, 8, 11]))
        uses = () if name is None else (use(name, min(start, length - 1), data.draw(st.sampled_from([1.0, 0.5]))),)
        tenant = data.draw(st.sampled_from(["acme", "pulse"]))
        world.add(f"r{index}", prompt, uses, tenant=tenant, max_tokens=data.draw(st.integers(1, 14)))
        for _ in range(data.draw(st.integers(0, 4))):
            world.step()
            check_tables(world)
        if data.draw(st.integers(0, 5)) == 0 and f"r{index}" not in world.ends:
            aborted.add(f"r{index}")
            world.scheduler.abort(f"r{index}")
    world.run()
    world.check_answers()
    check_tables(world)
    assert set(world.ends) == set(world.tokens) - aborted
    assert all(isinstance(end, FinishEvent) for end in world.ends.values())
    world.check_nothing_held()
    stats = world.engine.stats()
    looked_up = sum(len(world._requests[request_id].prompt_token_ids) for request_id in world.prompts)
    assert stats.num_prefix_hits <= stats.num_prefix_queries
    if not aborted:
        assert stats.num_prefix_queries == looked_up
        assert stats.num_prefix_hits == sum(cached(world, request_id) for request_id in world.prompts)


def test_tenants_share_blocks_of_the_base_model_alone_if_they_are_told_to() -> None:
    world = World(share_base_prefixes=True)

    def run(request_id: str, tenant: str, *uses: AdapterUse) -> int:
        world.add(request_id, PROMPT, uses, tenant=tenant, max_tokens=3)
        world.runner.tenants[world.scheduler._by_request[request_id].sequence_id] = "whoever"
        world.run()
        return cached(world, request_id)

    assert run("a", "one") == 0
    assert run("b", "another") == 20, "nobody's adapter made these"
    assert run("c", "one", use("x")) == 0
    assert run("d", "another", use("x")) == 0, "what an adapter made is its tenant's"
    assert run("e", "another", use("x")) == 20
    assert run("f", "one", use("y", start=10)) == 8, "the base's blocks before it acts"
    assert run("g", "another", use("y", start=10)) == 8
    assert run("h", "another", use("y", start=10)) == 20
    world.check_answers()
    check_tables(world)


def test_salt_keeps_prompts_apart_though_tenants_share_blocks_of_the_base_model() -> None:
    world = World(share_base_prefixes=True)

    def run(request_id: str, tenant: str, salt: str = "") -> int:
        scope = {"cache_scope": f"{tenant} {salt}", "is_salted": True} if salt else {}
        world.add(request_id, PROMPT, tenant=tenant, max_tokens=3, **scope)
        world.runner.tenants[world.scheduler._by_request[request_id].sequence_id] = salt
        world.run()
        return cached(world, request_id)

    assert run("a", "one", "pepper") == 0
    assert run("b", "one", "paprika") == 0
    assert run("c", "one", "pepper") == 20
    assert run("d", "another") == 0
    assert run("e", "one") == 20, "without a salt they share as before"
    world.check_answers()
    check_tables(world)
