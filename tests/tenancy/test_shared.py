"""Two replicas and a real Redis: one limit for both, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.core.errors import ConfigError, RateLimitedError
from lora_serve.core.tenant import Caller
from lora_serve.tenancy.metering import Meter, summed
from lora_serve.tenancy.quotas import Quotas
from lora_serve.tenancy.rate_limiter import RateLimiter, Reservation, SharedCounters
from lora_serve.tenancy.shared import RedisCounters, UsageExchange
from lora_serve.tenancy.usage import UsageFigures, UsageJournal, UsageKey
from tests.redis_server import RedisServer
from tests.tenancy.limited import Clock, caller

TIMEOUT = 20.0  # seconds, generous: a loaded machine must not look like a lost Redis


class Monotonic:
    """Seconds since when Redis was last asked in vain."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replica(url: str, clock: Clock, goes_on_alone: bool = True, since: Monotonic | None = None) -> Quotas:
    shared = SharedCounters(RedisCounters(url, "t", TIMEOUT), goes_on_alone, since or Monotonic())
    return Quotas(RateLimiter(shared, clock))


@pytest.fixture
async def pair(redis_url: str) -> AsyncIterator[tuple[Quotas, Quotas]]:
    clock = Clock()
    made = (replica(redis_url, clock), replica(redis_url, clock))
    yield made
    for one in made:
        await one.close()


async def granted(quotas: Quotas, who: Caller, num_tokens: int) -> Reservation:
    reservation = await quotas.reserve(who, num_tokens)
    assert reservation is not None
    return reservation


async def test_replicas_share_a_limit_and_what_one_gives_back_the_other_may_use(pair: tuple[Quotas, Quotas]) -> None:
    here, there = pair
    who = caller(requests=100, tokens=100)
    held = await granted(here, who, 80)
    with pytest.raises(RateLimitedError):
        await there.reserve(who, 30)
    here.settle(held, 50)
    await here.settled()
    reservation = await granted(there, who, 50)
    assert reservation.standings["tokens"].remaining == 0
    assert reservation.standings["requests"].remaining == 98, "the refused one was not counted"


async def test_replicas_share_the_registrations_of_a_minute(pair: tuple[Quotas, Quotas]) -> None:
    here, there = pair
    who = caller(registrations_per_minute=2)
    await here.begin_registration(who)
    await there.begin_registration(who)
    for quotas in (there, here):
        with pytest.raises(RateLimitedError) as caught:
            await quotas.begin_registration(who)
        assert caught.value.reason != "limits_away"
    assert await here.reserve(who, 1) is None, "inference has limits of its own"


async def test_crowd_on_both_replicas_gets_no_more_than_the_limit(pair: tuple[Quotas, Quotas]) -> None:
    who = caller(requests=20)
    outcomes = await asyncio.gather(*(pair[i % 2].reserve(who, 1) for i in range(60)), return_exceptions=True)
    granted_ones = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
    assert all(isinstance(outcome, Reservation | RateLimitedError) for outcome in outcomes)
    assert len(granted_ones) <= 20
    left = [await pair[0].reserve(who, 1) for _ in range(20 - len(granted_ones))]
    assert all(left), "what a refused crowd had taken for a moment is there again"
    with pytest.raises(RateLimitedError):
        await pair[1].reserve(who, 1)


async def test_counters_in_redis_expire_and_need_no_scripts(redis_url: str, shared_redis: RedisServer) -> None:
    with shared_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "plain", "on", ">word", "~t:*", "+@all", "-@scripting")
    url = redis_url.replace("redis://", "redis://plain:word@")
    quotas = replica(url, Clock())
    held = await granted(quotas, caller(tokens=100), 80)
    quotas.settle(held, 10)
    await quotas.close()
    with shared_redis.client() as client:
        keys = client.keys("t:rate:*")
        assert [int(client.get(key) or 0) for key in keys] == [10]
        assert all(0 < client.ttl(key) <= 180 for key in keys)


async def test_without_redis_each_replica_counts_alone_and_says_so_once(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock, since, who = Clock(), Monotonic(), caller(requests=2)
    quotas = replica(own_redis.url, clock, since=since)
    held = await granted(quotas, who, 1)
    own_redis.kill()
    with caplog.at_level(logging.INFO):
        quotas.settle(held, 0)
        for _ in range(2):
            await granted(quotas, who, 1)
        with pytest.raises(RateLimitedError):
            await quotas.reserve(who, 1)
        own_redis.start()
        since.now += 10
        await granted(quotas, who, 1)
    await quotas.close()
    told = [record.message for record in caplog.records if "shared rate counters" in record.message]
    assert len(told) == 2, told


async def test_without_redis_limited_callers_are_refused_if_the_operator_says_so(own_redis: RedisServer) -> None:
    quotas = replica(own_redis.url, Clock(), goes_on_alone=False)
    own_redis.kill()
    for _ in range(2):
        with pytest.raises(RateLimitedError) as caught:
            await quotas.reserve(caller(requests=2), 1)
        assert caught.value.reason == "limits_away"
    assert await quotas.reserve(Caller("acme"), 1) is None, "who has no limits need not be counted"
    await quotas.close()


async def test_spoilt_counter_in_redis_is_no_error_of_the_caller(redis_url: str, shared_redis: RedisServer) -> None:
    clock = Clock()
    with shared_redis.client() as client:
        client.set(f"t:rate:tenant:acme:requests:{int(clock.now // 60)}", "no number")
    quotas = replica(redis_url, clock)
    assert await granted(quotas, caller(requests=2), 1)
    await quotas.close()


def test_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError):
        RedisCounters("nonsense")


KEY = UsageKey("acme", "acme/a", "1", "sha256:a", "k1")
ONE = UsageFigures(requests=1, prompt_tokens=10, queue_seconds=0.1)
FOREVER = 2**40


def meter(url: str, store: Path, name: str) -> Meter:
    return Meter(UsageJournal(store / name), UsageExchange(url, "t", name, 400, timeout=20))


async def requests(one: Meter) -> tuple[int, bool]:
    rows, is_complete = await one.rows(0, FOREVER)
    return summed(rows, lambda bucket, key: ()).get((), UsageFigures()).requests, is_complete


async def test_every_replica_tells_the_sum_of_all(redis_url: str, tmp_path: Path) -> None:
    here, there = meter(redis_url, tmp_path, "here"), meter(redis_url, tmp_path, "there")
    here.record(KEY, ONE)
    there.record(KEY, ONE)
    for _ in range(2):
        await here.flush()
        await there.flush()
    here.record(KEY, ONE)
    assert await requests(here) == (3, True)
    assert await requests(there) == (2, True), "what is not flushed there is not known here"
    await here.close()
    assert await requests(there) == (3, True)
    await there.close()


async def test_what_redis_lost_is_told_again_and_not_twice(
    redis_url: str, shared_redis: RedisServer, tmp_path: Path
) -> None:
    here, there = meter(redis_url, tmp_path, "here"), meter(redis_url, tmp_path, "there")
    here.record(KEY, ONE)
    await here.flush()
    with shared_redis.client() as client:
        client.flushall()
    assert await requests(there) == (0, True)
    await here.flush()
    await here.flush()
    assert await requests(there) == (1, True)
    for one in (here, there):
        await one.close()


async def test_what_redis_forgot_by_starting_from_an_older_snapshot_is_told_again(
    redis_url: str, shared_redis: RedisServer, tmp_path: Path
) -> None:
    """Even what was counted, told and closed long before anybody looks, and over a restart of the replica."""
    here, there = meter(redis_url, tmp_path, "here"), meter(redis_url, tmp_path, "there")
    here.record(KEY, ONE)
    await here.flush()
    with shared_redis.client() as client:
        snapshot = {name: client.dump(name) for name in client.keys("t:usage:*")}
    here.record(KEY, ONE)
    await here.close()
    assert await requests(there) == (2, True)
    with shared_redis.client() as client:
        client.delete(*client.keys("t:usage:*"))
        for name, value in snapshot.items():
            client.restore(name, 0, value)
    again = meter(redis_url, tmp_path, "here")
    await again.flush()
    assert await requests(there) == (2, True)
    for one in (again, there):
        await one.close()


async def test_usage_of_a_store_from_before_receipts_is_kept(redis_url: str, tmp_path: Path) -> None:
    here = meter(redis_url, tmp_path, "here")
    here.record(KEY, ONE)
    await here.close()
    with closing(sqlite3.connect(tmp_path / "here" / "usage.sqlite3")) as database:
        database.executescript("DROP TABLE last_receipt; PRAGMA user_version = 1")
    again, there = meter(redis_url, tmp_path, "here"), meter(redis_url, tmp_path, "there")
    again.record(KEY, ONE)
    await again.flush()
    assert await requests(again) == await requests(there) == (2, True)
    for one in (again, there):
        await one.close()


async def test_without_redis_a_replica_tells_its_own_and_says_that_some_are_missing(
    own_redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = meter(own_redis.url, tmp_path, "here"), meter(own_redis.url, tmp_path, "there")
    there.record(KEY, ONE)
    await there.flush()
    own_redis.kill()
    for _ in range(3):
        await here.flush()
    assert sum("follow later" in record.message for record in caplog.records) == 1
    here.record(KEY, ONE)
    await here.flush()
    assert await requests(here) == (1, False)
    own_redis.start()
    await here.flush()
    assert await requests(here) == (2, True)
    assert await requests(there) == (2, True)
    for one in (here, there):
        await one.close()


async def test_days_in_redis_end_with_the_time_for_which_usage_is_kept(
    redis_url: str, shared_redis: RedisServer, tmp_path: Path
) -> None:
    here = meter(redis_url, tmp_path, "here")
    here.record(KEY, ONE)
    await here.close()
    with shared_redis.client() as client:
        days = client.keys("t:usage:here:*")
        assert len(days) == 1
        assert 400 * 86_400 < client.ttl(days[0]) <= 402 * 86_400


@pytest.mark.parametrize("kind", ["receipt", "day", "replicas", "rows"])
async def test_junk_in_redis_hides_no_usage_for_long(
    redis_url: str, shared_redis: RedisServer, tmp_path: Path, kind: str
) -> None:
    here, there = meter(redis_url, tmp_path, "here"), meter(redis_url, tmp_path, "there")
    here.record(KEY, ONE)
    await here.flush()
    with shared_redis.client() as client:
        (day,) = client.keys("t:usage:here:*")
        if kind == "rows":
            junk = {
                "x": "y",
                "[" * 5000: "[]",
                '[1, "a"]': "[1e999]",
                '["x", "a"]': "[1]",
                '[3, "b", "c", "d", "e", "f"]': "[-1]",
            }
            client.hset(day, mapping=junk)
        else:
            key = {"receipt": "t:usage:here", "day": day, "replicas": "t:usage:replicas"}[kind]
            client.delete(key)
            client.lpush(key, "junk")
    if kind == "rows":
        assert await requests(there) == (1, True)
    here.record(KEY, ONE)
    await here.flush()
    await there.flush()
    assert await requests(there) == (2, True)
    for one in (here, there):
        await one.close()
