"""Who may begin to wait, and when to come again."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import CapacityError, QueueFullError, TenantQueueFullError
from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.engine.queue_gate import QueueGate, WaitingLimit


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(name: str, num_tokens: int = 1, tenant: str = "acme", account: str = "") -> InferenceRequest:
    return InferenceRequest(name, tuple(range(num_tokens)), tenant=tenant, account=account)


def drained(gate: QueueGate, clock: Clock, per_second: float, seconds: float, num_tokens: int = 1) -> None:
    """The queue stays as long as it is, while so many requests come and go per second."""
    for number in range(int(per_second * seconds)):
        gate.enter((request(f"passing-{clock.now}-{number}", num_tokens),), limited=False)
        clock.now += 1 / per_second
        gate.leave(next(iter(gate._waiting)))


def refusal(gate: QueueGate, *requests: InferenceRequest) -> CapacityError:
    with pytest.raises(CapacityError) as caught:
        gate.enter(requests)
    return caught.value


def test_requests_beyond_the_limit_are_refused_until_one_leaves() -> None:
    gate = QueueGate(QueueLimits(max_queue=2))
    gate.enter((request("a"),))
    gate.check()
    gate.enter((request("b"),))
    with pytest.raises(QueueFullError) as caught:
        gate.check()
    assert caught.value.reason == "queue_requests"
    assert isinstance(refusal(gate, request("c")), QueueFullError)
    gate.leave("a")
    gate.enter((request("c"),))
    assert gate.num_requests == 2


def test_prompt_tokens_beyond_the_limit_are_refused() -> None:
    gate = QueueGate(QueueLimits(max_queue=100, max_queue_tokens=10))
    gate.enter((request("a", 6),))
    gate.check()
    assert refusal(gate, request("b", 5)).reason == "queue_tokens"
    gate.enter((request("c", 4),))
    assert gate.num_tokens == 10
    with pytest.raises(QueueFullError):
        gate.check()


def test_requests_of_one_answer_enter_together_or_not_at_all() -> None:
    gate = QueueGate(QueueLimits(max_queue=3))
    gate.enter((request("a"),))
    refusal(gate, *(request(f"b{index}") for index in range(3)))
    assert gate.num_requests == 1
    with gate.entered([request(f"c{index}") for index in range(2)]):
        gate.enter((request("c0"),))  # the client asks again for each
        assert gate.num_requests == 3
    assert gate.num_requests == 1


def test_what_is_larger_than_the_whole_queue_enters_an_empty_one_only() -> None:
    gate = QueueGate(QueueLimits(max_queue=2, max_queue_tokens=10))
    large = [request(f"large{index}", 20) for index in range(4)]
    with gate.entered((request("a"),)):
        refusal(gate, *large)
    with gate.entered(large):
        assert gate.num_requests == 4


def test_a_tenant_at_its_own_limit_is_refused_and_others_are_not() -> None:
    gate = QueueGate(QueueLimits(max_queue=100, max_tenant_queue=2, max_tenant_queue_tokens=50))
    gate.enter((request("a", 10), request("b", 10)))
    refused = refusal(gate, request("c", 10))
    assert isinstance(refused, TenantQueueFullError)
    assert (refused.reason, refused.requests, refused.tokens) == ("tenant_requests", (2, 0), (50, 30))
    gate.leave("a")
    assert refusal(gate, request("c", 45)).reason == "tenant_tokens"
    gate.enter((request("d", 45, tenant="other"),))


def test_the_account_is_whose_share_counts_whatever_the_tenant() -> None:
    gate = QueueGate(QueueLimits(max_queue=100, max_tenant_queue=1))
    gate.enter((request("a", tenant="admin", account="acme"),))
    gate.enter((request("b", tenant="admin", account="globex"),))
    assert isinstance(refusal(gate, request("c", tenant="acme")), TenantQueueFullError)


def test_unlimited_requests_enter_a_full_queue_and_are_counted() -> None:
    gate = QueueGate(QueueLimits(max_queue=1))
    gate.enter([request(f"warm-up-{index}") for index in range(3)], limited=False)
    assert gate.num_requests == 3
    refusal(gate, request("a"))


def test_retry_after_is_the_time_until_there_is_room_at_the_drain_rate() -> None:
    clock = Clock()
    gate = QueueGate(QueueLimits(max_queue=40), clock)
    gate.enter([request(f"r{index}") for index in range(40)])
    drained(gate, clock, per_second=4, seconds=20)
    assert refusal(gate, request("a")).retry_after == pytest.approx(1 / 4, rel=0.05)
    assert refusal(gate, *(request(f"a{index}") for index in range(20))).retry_after == pytest.approx(5, rel=0.05)


def test_retry_after_follows_tokens_where_they_are_what_is_short() -> None:
    clock = Clock()
    gate = QueueGate(QueueLimits(max_queue=1000, max_queue_tokens=400), clock)
    gate.enter([request(f"r{index}", 100) for index in range(4)])
    drained(gate, clock, per_second=2, seconds=20, num_tokens=100)  # 200 tokens per second
    assert refusal(gate, request("a", 300)).retry_after == pytest.approx(1.5, rel=0.05)


def test_drain_rate_follows_a_change_and_an_idle_hour_does_not_make_it_slow() -> None:
    clock = Clock()
    gate = QueueGate(QueueLimits(max_queue=10), clock)
    gate.enter([request(f"r{index}") for index in range(10)])
    drained(gate, clock, per_second=10, seconds=20)
    drained(gate, clock, per_second=0.5, seconds=40)
    assert refusal(gate, request("a")).retry_after == pytest.approx(2, rel=0.25)
    for name in list(gate._waiting):
        gate.leave(name)
    before = gate._all.seconds_until_left(1, 0, clock.now)
    clock.now += 3600
    assert gate._all.seconds_until_left(1, 0, clock.now) == pytest.approx(before)


def test_a_stalled_queue_makes_callers_wait_longer_and_longer() -> None:
    clock = Clock()
    gate = QueueGate(QueueLimits(max_queue=1), clock)
    gate.enter((request("r"), request("s")), limited=False)
    drained(gate, clock, per_second=10, seconds=5)
    waits = []
    for _ in range(3):
        waits.append(refusal(gate, request("a")).retry_after)
        clock.now += 10
    assert waits == sorted(waits)
    assert waits[2] > 10 * waits[0]


def test_before_anything_has_left_a_second_is_said() -> None:
    gate = QueueGate(QueueLimits(max_queue=1))
    gate.enter((request("r"),))
    assert refusal(gate, request("a")).retry_after == 1.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 40), st.sampled_from("ab")), max_size=60))
def test_whatever_comes_and_goes_limits_hold_and_nothing_stays_counted(
    steps: list[tuple[bool, int, int, str]],
) -> None:
    gate = QueueGate(QueueLimits(max_queue=5, max_queue_tokens=60, max_tenant_queue=3, max_tenant_queue_tokens=40))
    for is_arrival, number, num_tokens, tenant in steps:
        if not is_arrival:
            gate.leave(f"r{number}")
            continue
        with suppress(CapacityError):
            gate.enter((request(f"r{number}", num_tokens, tenant),))
        assert gate.num_requests <= 5
        assert gate.num_tokens <= 60
        assert all(line.num_requests <= 3 and line.num_tokens <= 40 for line in gate._lines.values())
    for number in range(10):
        gate.leave(f"r{number}")
    assert (gate.num_requests, gate.num_tokens, gate._lines) == (0, 0, {})


def test_callers_own_lines_are_limited_beside_its_account() -> None:
    gate = QueueGate(QueueLimits(max_queue=100))
    lines = (WaitingLimit("tenant:acme", 3), WaitingLimit("key:a", 1))
    gate.enter((request("a"),), lines=lines)
    with pytest.raises(TenantQueueFullError) as caught:
        gate.enter((request("b"),), lines=lines)
    assert caught.value.requests == (1, 0)
    other_key = (WaitingLimit("tenant:acme", 3), WaitingLimit("key:b", 9))
    gate.enter((request("c"), request("d")), lines=other_key)
    with pytest.raises(TenantQueueFullError):
        gate.enter((request("e"),), lines=other_key)
    gate.enter((request("f", tenant="globex"),))
    for name in "acdf":
        gate.leave(name)
    gate.enter((request("b"),), lines=lines)
    assert (gate.num_requests, gate.num_tokens) == (1, 1)
