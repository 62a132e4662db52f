"""How many rows run at once, and who waits."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import RequestTimeoutError
from lora_serve.tenancy.quotas import ConcurrencyLimit, ConcurrencyLimiter

TENANT, KEY_A, KEY_B = ConcurrencyLimit("tenant:acme", 2), ConcurrencyLimit("key:a", 1), ConcurrencyLimit("key:b", 1)


async def settle() -> None:
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Row:
    """Holds its place until it is told to end."""

    def __init__(self, places: ConcurrencyLimiter, *limits: ConcurrencyLimit) -> None:
        self.runs = False
        self.end = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(places, limits))

    async def _run(self, places: ConcurrencyLimiter, limits: tuple[ConcurrencyLimit, ...]) -> None:
        async with places.held(limits):
            self.runs = True
            await self.end.wait()


async def test_rows_beyond_the_limit_wait_in_order() -> None:
    places = ConcurrencyLimiter()
    rows = [Row(places, TENANT) for _ in range(4)]
    await settle()
    assert [row.runs for row in rows] == [True, True, False, False]
    rows[0].end.set()
    await settle()
    assert [row.runs for row in rows] == [True, True, True, False]
    for row in rows:
        row.end.set()
    await asyncio.gather(*(row.task for row in rows))
    assert (places.num_held, places.num_waiting) == (0, 0)


async def test_row_that_ends_in_the_moment_in_which_a_waiting_one_is_cancelled_ends_well() -> None:
    places = ConcurrencyLimiter()
    running, leaving, waiting = (Row(places, TENANT, KEY_A) for _ in range(3))
    await settle()
    running.end.set()
    leaving.task.cancel()
    await settle()
    assert running.task.done()
    assert running.task.exception() is None
    assert leaving.task.cancelled()
    assert waiting.runs, "the place goes to the next"
    waiting.end.set()
    await waiting.task
    assert (places.num_held, places.num_waiting) == (0, 0)


async def test_key_that_waits_for_itself_holds_up_no_other_key() -> None:
    places = ConcurrencyLimiter()
    first, second, other = Row(places, TENANT, KEY_A), Row(places, TENANT, KEY_A), Row(places, TENANT, KEY_B)
    await settle()
    assert (first.runs, second.runs, other.runs) == (True, False, True)
    assert places.num_held == 4
    for row in (first, second, other):
        row.end.set()
    await asyncio.gather(first.task, second.task, other.task)
    assert places.num_held == 0


async def test_row_that_gives_up_or_fails_leaves_its_place_to_the_next() -> None:
    places, one = ConcurrencyLimiter(), ConcurrencyLimit("tenant:acme", 1)
    running, waiting, next_one = Row(places, one), Row(places, one), Row(places, one)
    await settle()
    waiting.task.cancel()
    await settle()
    running.task.cancel()
    await settle()
    assert next_one.runs
    next_one.end.set()
    await next_one.task
    with pytest.raises(ZeroDivisionError):
        async with places.held([one]):
            raise ZeroDivisionError
    assert (places.num_held, places.num_waiting) == (0, 0)


async def test_place_granted_in_the_moment_of_leaving_is_given_back() -> None:
    places, one = ConcurrencyLimiter(), ConcurrencyLimit("tenant:acme", 1)
    running, waiting = Row(places, one), Row(places, one)
    await settle()
    async with AsyncExitStack():
        running.end.set()
        await asyncio.sleep(0)  # it ends, and the other is granted its place
        waiting.task.cancel()
    await asyncio.gather(running.task, waiting.task, return_exceptions=True)
    assert (places.num_held, places.num_waiting) == (0, 0)


async def test_deadline_ends_the_wait() -> None:
    places, one = ConcurrencyLimiter(), ConcurrencyLimit("tenant:acme", 1)
    running = Row(places, one)
    await settle()
    with pytest.raises(RequestTimeoutError):
        async with places.held([one], deadline=time.monotonic() - 1):
            pytest.fail("there was no place")
    assert places.num_waiting == 0
    running.end.set()
    await running.task


async def test_limit_of_zero_refuses_at_once() -> None:
    with pytest.raises(Exception, match="none of your"):
        async with ConcurrencyLimiter().held([ConcurrencyLimit("tenant:acme", 0)]):
            pytest.fail("nobody may run")


async def test_raised_limit_lets_those_who_wait_run_before_newcomers() -> None:
    places, one = ConcurrencyLimiter(), replace(TENANT, limit=1)
    rows = [Row(places, one, KEY_A), Row(places, one, KEY_B)]
    await settle()
    assert [row.runs for row in rows] == [True, False]
    rows += [Row(places, TENANT), Row(places, TENANT)]
    await settle()
    assert [row.runs for row in rows] == [True, True, False, False]
    rows[0].end.set()
    await settle()
    assert [row.runs for row in rows] == [True, True, True, False]
    for row in rows:
        row.end.set()
    await asyncio.gather(*(row.task for row in rows))
    assert (places._limits, places._num_rows) == ({}, {}), "nothing is kept of scopes without rows"


async def test_lowered_limit_lets_nobody_in_while_more_run_than_it_allows() -> None:
    places = ConcurrencyLimiter()
    rows = [Row(places, replace(TENANT, limit=4)) for _ in range(5)]
    await settle()
    rows.append(Row(places, TENANT))
    for running in rows[:2]:
        running.end.set()
        await settle()
        assert places.num_waiting == 2, "also the row that came under the higher limit"
    assert places.num_held == 2
    rows[2].end.set()
    await settle()
    assert [row.runs for row in rows[4:]] == [True, False]
    for row in rows:
        row.end.set()
    await asyncio.gather(*(row.task for row in rows))
    assert (places.num_held, places.num_waiting) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(("run", "cancel", "end"))), max_size=40))
def test_no_place_leaks_and_no_limit_is_exceeded(walk: list[tuple[str, str]]) -> None:
    limits = {"a": (TENANT, KEY_A), "b": (TENANT, KEY_B)}

    async def run() -> None:
        places, rows = ConcurrencyLimiter(), list[tuple[str, Row]]()
        for number, (key, act) in enumerate(walk):
            if act == "run":
                rows.append((key, Row(places, *limits[key])))
            elif rows:
                row = rows.pop(number % len(rows))[1]
                row.task.cancel() if act == "cancel" else row.end.set()
            await settle()
            for key_, limit in (("a", 1), ("b", 1)):
                assert sum(row.runs for k, row in rows if k == key_) <= limit
        for _, row in rows:
            row.end.set()
        await settle()
        await asyncio.gather(*(row.task for _, row in rows), return_exceptions=True)
        assert (places.num_held, places.num_waiting) == (0, 0)

    asyncio.run(run())
