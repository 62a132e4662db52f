"""What is reserved for a request, given back, and refused."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import RateLimitedError
from lora_serve.core.tenant import Caller, Quota
from lora_serve.tenancy.quotas import Quotas, rate_limits
from lora_serve.tenancy.rate_limiter import KEPT_MINUTES, WINDOW, MemoryCounters, Reservation, WindowCount
from tests.tenancy.limited import Clock, caller, limiter


async def remaining(quotas: Quotas, who: Caller) -> int:
    """Tokens of the caller's minute, as the next request would see them."""
    reservation = await quotas.reserve(who, 1)
    assert reservation is not None
    quotas.settle(reservation, 0)
    await quotas.settled()
    return reservation.standings["tokens"].remaining + 1


async def test_requests_of_a_minute_are_counted_and_the_next_is_told_when_to_come() -> None:
    clock = Clock()
    quotas = Quotas(limiter(clock))
    for left in (1, 0):
        reservation = await quotas.reserve(caller(requests=2), 10)
        assert reservation is not None
        assert reservation.standings["requests"].remaining == left
    with pytest.raises(RateLimitedError) as caught:
        await quotas.reserve(caller(requests=2), 10)
    assert caught.value.reason == "tenant_requests_per_minute"
    assert caught.value.retry_after == 90  # half of the minute's two requests may count then
    assert caught.value.standings["requests"].limit == 2
    clock.now += 91
    assert await quotas.reserve(caller(requests=2), 10) is not None


async def test_what_was_not_used_is_given_back_and_what_was_is_charged() -> None:
    quotas, who = Quotas(limiter(Clock())), caller(tokens=100)
    reservation = await quotas.reserve(who, 80)
    assert reservation is not None
    assert reservation.standings["tokens"].remaining == 20
    with pytest.raises(RateLimitedError):
        await quotas.reserve(who, 30)
    quotas.settle(reservation, 15)
    await quotas.settled()
    assert await remaining(quotas, who) == 85


async def test_request_larger_than_the_whole_limit_enters_an_unused_minute_and_is_charged_in_full() -> None:
    clock = Clock()
    quotas, who = Quotas(limiter(clock)), caller(tokens=100)
    reservation = await quotas.reserve(who, 1000)
    assert reservation is not None
    quotas.settle(reservation, 250)
    await quotas.settled()
    clock.now += 60
    with pytest.raises(RateLimitedError) as caught:
        await quotas.reserve(who, 1)
    assert caught.value.reason == "tenant_tokens_per_minute"
    assert 36 < caught.value.retry_after < 37, "until 250 tokens of the minute before count less than 100"


async def test_tokens_given_back_after_their_time_are_nobodys() -> None:
    clock = Clock()
    quotas, who = Quotas(limiter(clock)), caller(tokens=100)
    reservation = await quotas.reserve(who, 80)
    clock.now += 180
    quotas.settle(reservation, 0)
    await quotas.settled()
    assert await remaining(quotas, who) == 100


async def test_limit_of_zero_lets_nobody_in() -> None:
    quotas = Quotas(limiter(Clock()))
    for who in (caller(requests=0), caller(tokens=0)):
        with pytest.raises(RateLimitedError):
            await quotas.reserve(who, 1)


async def test_key_and_tenant_both_have_to_allow_it_and_a_refusal_costs_neither() -> None:
    quotas = Quotas(limiter(Clock()))
    first = Caller("acme", key_id="k1", quota=Quota(tokens_per_minute=100), key_quota=Quota(tokens_per_minute=50))
    second = Caller("acme", key_id="k2", quota=Quota(tokens_per_minute=100))
    held = await quotas.reserve(first, 40)
    assert held is not None
    assert held.standings["tokens"].remaining == 10, "the tighter of both"
    with pytest.raises(RateLimitedError) as caught:
        await quotas.reserve(first, 20)
    assert caught.value.reason == "key_tokens_per_minute"
    other = await quotas.reserve(second, 60)
    assert other is not None
    assert other.standings["tokens"].remaining == 0
    with pytest.raises(RateLimitedError) as caught:
        await quotas.reserve(second, 1)
    assert caught.value.reason == "tenant_tokens_per_minute"


async def test_refusal_for_want_of_requests_is_repeated_without_being_counted() -> None:
    clock = Clock()
    quotas, who = Quotas(limiter(clock)), caller(requests=1)
    quotas.check(who)
    assert await quotas.reserve(who, 1) is not None
    quotas.check(who)
    with pytest.raises(RateLimitedError):
        await quotas.reserve(who, 1)
    with pytest.raises(RateLimitedError) as caught:
        quotas.check(who)
    assert caught.value.standings["requests"].remaining == 0
    quotas.check(Caller("other", quota=Quota(requests_per_minute=1)))
    clock.now += 1.5
    quotas.check(who)


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_refusal_is_not_repeated_for_as_long_as_a_clock_was_set_back(jump: float) -> None:
    clock = Clock()
    quotas, who = Quotas(limiter(clock)), caller(requests=1)
    assert await quotas.reserve(who, 1) is not None
    with pytest.raises(RateLimitedError):
        await quotas.reserve(who, 1)
    clock.now += jump
    quotas.check(who)
    assert await quotas.reserve(who, 1) is not None


async def test_refusal_keeps_nothing_of_its_request_and_is_forgotten_when_it_is_over() -> None:
    """Whoever is refused may never come again: tenants and keys are deleted."""

    class Body:
        """What a frame of a request holds."""

    clock = Clock()
    limits = limiter(clock)
    quotas, bodies, refused = Quotas(limits), list[weakref.ref[Body]](), list[int]()

    async def ask(number: int) -> None:
        body, who = Body(), Caller(f"guest-{number}", quota=Quota(requests_per_minute=0))
        bodies.append(weakref.ref(body))
        try:
            await quotas.reserve(who, 1)
        except RateLimitedError:
            refused.append(number)
        try:
            quotas.check(who)
        except RateLimitedError:
            refused.append(number)

    for number in range(50):
        await ask(number)
        clock.now += 0.1
    await asyncio.sleep(0)  # this turn of the loop has the last error itself
    gc.collect()
    assert len(refused) == 100
    assert [body() for body in bodies] == [None] * 50
    assert len(limits._refusals) <= 11  # of the last second


async def test_caller_without_limits_is_not_counted() -> None:
    quotas = Quotas(limiter(Clock()))
    assert rate_limits(Caller("acme", key_id="k1")) == ()
    assert await quotas.reserve(Caller("acme", key_id="k1"), 10**9) is None
    quotas.settle(None, 10**9)


async def test_caller_who_leaves_while_it_is_counted_holds_nothing_afterwards() -> None:
    quotas, who = Quotas(limiter(Clock())), caller(tokens=100)
    task = asyncio.ensure_future(quotas.reserve(who, 80))
    await asyncio.sleep(0)  # it has begun
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.sleep(0)
    assert await remaining(quotas, who) == 100


steps = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(1, 150)),
        st.tuples(st.just("settle"), st.integers(0, 150)),
        st.tuples(st.just("wait"), st.integers(0, 200)),
    ),
    max_size=40,
)


@given(steps)
def test_nothing_leaks_whatever_comes_and_ends_in_whatever_order(walk: list[tuple[str, int]]) -> None:
    async def run() -> None:
        clock, held = Clock(), list[tuple[Reservation | None, int]]()
        quotas, who = Quotas(limiter(clock)), caller(tokens=100)
        for act, number in walk:
            if act == "wait":
                clock.now += number
            elif act == "settle" and held:
                reservation, most = held.pop(number % len(held))
                quotas.settle(reservation, min(number, most))
                await quotas.settled()
            elif act == "reserve":
                try:
                    reservation = await quotas.reserve(who, number)
                except RateLimitedError:
                    continue
                assert reservation is not None
                assert 0 <= reservation.standings["tokens"].remaining <= 100
                held.append((reservation, number))
        for reservation, _ in held:
            quotas.settle(reservation, 0)
        await quotas.settled()
        clock.now += 120
        assert await remaining(quotas, who) == 100
        await quotas.close()

    asyncio.run(run())


counts = st.integers(0, 1000)
parts = st.floats(0, 1, exclude_max=True)


def after(window: WindowCount, seconds: float) -> WindowCount:
    """The same counters later."""
    minutes, elapsed = divmod(window.elapsed + seconds / WINDOW, 1)
    if minutes == 0:
        return WindowCount(window.previous, window.current, elapsed)
    return WindowCount(window.current if minutes == 1 else 0, 0, elapsed)


def test_the_minute_before_counts_less_and_less() -> None:
    assert WindowCount(100, 10, 0.0).used == 110
    assert WindowCount(100, 10, 0.75).used == 35
    assert WindowCount(100, 10, 0.75).remaining(40) == 5


def test_seconds_until_room_are_those_that_it_takes() -> None:
    assert WindowCount(0, 10, 0.5).seconds_until(10, 1) == 30 + 6
    assert WindowCount(10, 0, 0.5).seconds_until(5, 1) == pytest.approx(6)
    assert WindowCount(0, 4, 0.5).seconds_until(5, 1) == 0
    assert WindowCount(0, 0, 0.5).seconds_until(0, 1) == 120


def test_a_limit_is_unused_once_its_last_minute_is_over() -> None:
    assert WindowCount(0, 0, 0.5).seconds_until_unused == 0
    assert WindowCount(3, 0, 0.5).seconds_until_unused == 30
    assert WindowCount(3, 1, 0.5).seconds_until_unused == 90


@given(counts, counts, parts, st.integers(1, 1000), st.data())
def test_whoever_waits_as_long_as_told_gets_in_and_not_much_sooner(
    previous: int, current: int, elapsed: float, limit: int, data: st.DataObject
) -> None:
    cost = data.draw(st.integers(1, limit))
    window = WindowCount(previous, current, elapsed)
    seconds = window.seconds_until(limit, cost)
    later = after(window, seconds + 1e-6)
    assert later.used + cost <= limit + 1e-3
    if seconds > 1e-3:
        sooner = after(window, seconds * 0.99 - 1e-6)
        assert sooner.used + cost > limit - 1e-3


async def test_counts_are_those_of_a_minute_and_the_one_before() -> None:
    counters = MemoryCounters()
    assert await counters.add({"a": 5, "b": 1}, 10) == {"a": (0, 5), "b": (0, 1)}
    assert await counters.add({"a": -2}, 10) == {"a": (0, 3)}
    assert await counters.add({"a": 4}, 11) == {"a": (3, 4)}
    assert await counters.add({"a": 1}, 13) == {"a": (0, 1)}
    await counters.close()


async def test_what_is_given_back_to_the_minute_before_counts_for_this_one() -> None:
    counters = MemoryCounters()
    await counters.add({"a": 5}, 10)
    await counters.add({"a": 1}, 11)
    assert await counters.add({"a": -2}, 10) == {"a": (0, 3)}
    assert await counters.add({"a": 1}, 11) == {"a": (3, 2)}


async def test_counters_that_nobody_reads_any_more_are_dropped() -> None:
    now = 0.0
    counters = MemoryCounters(lambda: now)
    for minute in (1, 2, 3, 50, 51, 7):  # at last the wall clock is set back
        now += 61.0
        await counters.add({f"old-{minute}-{number}": 1 for number in range(100)}, minute)
        assert len(counters._minutes) <= KEPT_MINUTES
    now += 61.0 * KEPT_MINUTES
    await counters.add({"a": 1}, 8)
    assert list(counters._minutes) == [8]


async def test_clock_that_jumps_and_comes_back_finds_its_minute_again() -> None:
    counters = MemoryCounters(lambda: 0.0)
    await counters.add({"a": 2}, 100)
    assert await counters.add({"a": 1}, 9000) == {"a": (0, 1)}
    assert await counters.add({"a": 1}, 100) == {"a": (0, 3)}
