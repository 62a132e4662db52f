"""The virtual token counter: equal service for weights, nothing saved up, nobody forgotten, slots in shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lora_serve.core.batch import SlotRef
from tests.engine.policies.traffic import STEP, ids, policy_of, timed_world, waiting
from tests.engine.world import World, adapter

ROWS, LONGEST_PROMPT, LONGEST_OUTPUT = 4, 12, 10
BOUND = 2 * max(LONGEST_PROMPT, 2 * ROWS * (LONGEST_PROMPT + LONGEST_OUTPUT))  # theorem 4.4, M = tokens of a batch


def backlog(world: World, account: str, count: int, prompt: int, output: int, first: int = 0) -> None:
    for number in range(first, first + count):
        tokens = [sum(account.encode()) % 400, number % 500, *range(prompt - 2)]
        world.add(f"{account}{number}", tokens, account=account, max_tokens=output)


def services(world: World) -> Iterator[Counter[str]]:
    """After each step, what each account has had: 1 per prompt token, 2 per output token, none twice."""
    total: Counter[str] = Counter()
    done: Counter[str] = Counter()  # prompt tokens, by request
    given: Counter[str] = Counter()  # output tokens, by request
    while world.step():
        requests = tuple(world._requests.values())  # sequences are numbered as they come
        for row in world.runner.batches[-1].rows:
            request = requests[row.sequence_id]
            key = request.request_id
            num_prompt = max(done[key], min(row.start + len(row.token_ids), len(request.prompt_token_ids)))
            num_output = len(world.tokens[key])
            total[request.account] += num_prompt - done[key] + 2 * (num_output - given[key])
            done[key], given[key] = num_prompt, num_output
        yield total


def fair_world(policy: str = "fair", **settings: Any) -> World:
    limits = {"max_num_seqs": ROWS, "enable_prefix_caching": False}
    world, _ = timed_world(policy, **{**limits, **settings})
    return world


def largest_gap(policy: str) -> tuple[float, int]:
    """Between two accounts while both wait; and the service that both had."""
    world = fair_world(policy)
    backlog(world, "long", 150, LONGEST_PROMPT, LONGEST_OUTPUT)
    backlog(world, "short", 600, 3, 3)
    gap, total = 0, 0
    for total_by_account in services(world):
        if len({s.account for s in world.scheduler.waiting}) < 2:
            break
        gap = max(gap, abs(total_by_account["long"] - total_by_account["short"]))
        total = sum(total_by_account.values())
    return gap, total


def test_service_of_two_backlogged_accounts_differs_by_no_more_than_the_papers_bound() -> None:
    gap, total = largest_gap("fair")
    assert total > 10 * BOUND
    assert gap <= BOUND


def test_first_come_first_served_breaks_that_bound() -> None:
    assert largest_gap("fcfs")[0] > 3 * BOUND


def test_bound_holds_when_recomputing_after_preemptions_charges_nothing() -> None:
    world = fair_world(num_blocks=24, max_model_len=40)
    backlog(world, "long", 60, LONGEST_PROMPT, 20)
    backlog(world, "short", 300, 3, 8)
    charged, policy = [0, 0], world.scheduler._policy
    served = policy.served

    def count(sequence: Any, num_prompt: int, num_output: int) -> None:
        served(sequence, num_prompt, num_output)
        charged[:] = charged[0] + num_prompt, charged[1] + num_output

    policy.served = count  # type: ignore[method-assign]
    gap = 0
    for total in services(world):
        if len({s.account for s in world.scheduler.waiting}) == 2:
            gap = max(gap, abs(total["long"] - total["short"]))
    assert world.scheduler.num_preemptions > 10
    assert charged == [60 * LONGEST_PROMPT + 300 * 3, 60 * 20 + 300 * 8]
    assert gap <= 2 * max(LONGEST_PROMPT, 2 * ROWS * (LONGEST_PROMPT + 20))
    world.check_answers()
    world.check_nothing_held()


def test_prompt_that_is_computed_again_is_no_service() -> None:
    sequence = waiting(0, prompt_tokens=10)
    served = []
    for start, computed in [(0, 6), (6, 10), (10, 11), (0, 8), (8, 12)]:
        sequence.num_computed = computed
        served.append(sequence.newly_served(start))
    assert served == [6, 4, 0, 0, 0]


def test_found_in_the_prefix_cache_is_no_service() -> None:
    sequence = waiting(0, prompt_tokens=10)
    sequence.num_computed = 10
    assert sequence.newly_served(8) == 2


def test_weights_are_shares() -> None:
    world = fair_world(tenant_weight="big=2,small=1")
    for account in ("small", "big"):
        backlog(world, account, 400, 6, 6)
    for total in services(world):
        if sum(total.values()) > 4000:
            break
    assert total["big"] / total["small"] == pytest.approx(2, rel=0.1)


def test_idle_account_gets_no_credit() -> None:
    world = fair_world()
    backlog(world, "idle", 1, 6, 6)
    backlog(world, "busy", 600, 6, 6)
    steps = services(world)
    for total in steps:
        if total["busy"] > 3000:
            break
    backlog(world, "idle", 200, 6, 6, first=1)
    before = Counter(total)
    for total in steps:
        if sum(total.values()) - sum(before.values()) > 1500:
            break
    assert total["busy"] - before["busy"] == pytest.approx(750, rel=0.15)


def test_flood_of_one_leaves_the_others_their_shares() -> None:
    world = fair_world()
    backlog(world, "flood", 1000, 6, 6)
    for account in ("a", "b", "c"):
        backlog(world, account, 150, 6, 6)
    for total in services(world):
        if sum(total.values()) > 4000:
            break
    for account in ("a", "b", "c"):
        assert total[account] / sum(total.values()) == pytest.approx(0.25, rel=0.1)


def test_share_that_nobody_uses_is_used_by_others() -> None:
    world = fair_world(tenant_weight="alone=0.01")
    backlog(world, "alone", 40, 6, 6)
    world.step()
    assert all(len(batch.rows) == ROWS for batch in world.runner.batches)
    world.run()
    world.check_answers()


def test_account_that_got_nothing_for_max_wait_comes_first_with_one_sequence() -> None:
    world, clock = timed_world("fair", max_num_seqs=2, tenant_weight="poor=0.0001", max_wait_ms=1000)
    backlog(world, "poor", 5, 6, 6)
    backlog(world, "rich", 400, 6, 6)
    start = clock.now
    while "poor4" not in world.prompts:
        world.step()
    # one begins at once, as all counters are 0; then one per max_wait and at most the steps of a running row
    assert 3.5 <= clock.now - start <= 4 * (1 + 12 * STEP) + 12 * STEP
    world.run()
    world.check_answers()


def test_overdue_account_does_not_let_its_whole_queue_pass() -> None:
    policy = policy_of("fair", max_wait=10, weights=(("flood", 0.01),))
    for number in range(6):
        policy.add(waiting(number, account="flood" if number < 4 else "calm", arrival_time=0.0))
    policy.served(waiting(9, account="flood"), 500, 0)
    order = ids(policy, now=50)
    assert sorted(order[:2]) == [0, 4], "one of each, as both are overdue"
    assert order[2:] == [5, 1, 2, 3]


def test_within_an_account_priority_comes_before_arrival() -> None:
    policy = policy_of("fair")
    for number, priority in enumerate([1, 0, -1]):
        policy.add(waiting(number, account="a", priority=priority))
    assert ids(policy) == [2, 1, 0]


def slots_policy(num_slots: int, weights: tuple[tuple[str, float], ...] = ()) -> Any:
    return policy_of(
        "fair",
        is_on_host=lambda ref: True,
        is_on_device=lambda ref: ref.name.startswith("here"),
        num_slots=lambda: num_slots,
        weights=weights,
    )


def may_take_slot(policy: Any, sequence: Any, rows: list[Any]) -> bool:
    policy.order(0.0)  # as each step begins
    return policy.may_take_slot(sequence, rows)


def running(account: str, *names: str) -> list[Any]:
    rows = [waiting(100 + number, adapter(name), account=account) for number, name in enumerate(names)]
    for number, row in enumerate(rows):
        row.slots = (SlotRef(number, 1, row.refs[0].digest),)
    return rows


def test_account_with_its_share_of_slots_takes_no_more_while_another_waits_for_one() -> None:
    policy = slots_policy(4)
    greedy = waiting(0, adapter("x"), account="greedy")
    policy.add(greedy)
    rows = running("greedy", "here1", "here2")
    assert may_take_slot(policy, greedy, rows), "nobody else wants one"
    modest = waiting(1, adapter("y"), account="modest")
    policy.add(modest)
    assert not may_take_slot(policy, greedy, rows)
    assert may_take_slot(policy, modest, rows)
    assert may_take_slot(policy, greedy, rows[:1]), "below its share of two"
    policy.remove(modest)
    assert may_take_slot(policy, greedy, rows)


def test_shares_of_slots_follow_weights() -> None:
    policy = slots_policy(4, (("greedy", 3),))
    greedy = waiting(0, adapter("x"), account="greedy")
    policy.add(greedy)
    policy.add(waiting(1, adapter("y"), account="modest"))
    assert may_take_slot(policy, greedy, running("greedy", "here1", "here2"))
    assert not may_take_slot(policy, greedy, running("greedy", "here1", "here2", "here3"))


def test_account_that_waits_only_for_what_is_on_the_device_blocks_nobody() -> None:
    policy = slots_policy(2)
    greedy = waiting(0, adapter("x"), account="greedy")
    policy.add(greedy)
    policy.add(waiting(1, adapter("here9"), account="modest"))
    assert may_take_slot(policy, greedy, running("greedy", "here1", "here2"))


def test_greedy_account_does_not_push_out_another_in_a_whole_engine() -> None:
    """`modest` has had more tokens, so its turn comes late, and still it gets the next slot."""
    world = fair_world(max_loras=2, max_num_seqs=8)
    backlog(world, "modest", 3, 60, 2)
    world.run()
    for number in range(6):
        world.add(f"g{number}", [number], adapter(f"g{number}"), account="greedy", max_tokens=6 + 6 * (number == 0))
    world.step()
    world.add("m", [1], adapter("m"), account="modest", max_tokens=4)
    world.run()
    assert world.order[3:6] == ["g1", "m", "g0"]
    world.check_answers()


def test_accounts_that_went_are_forgotten() -> None:
    policy = policy_of("fair")
    for number in range(5000):
        sequence = waiting(number, account=f"a{number}")
        policy.add(sequence)
        policy.remove(sequence)
    assert len(policy._accounts) < 2000  # type: ignore[attr-defined]
