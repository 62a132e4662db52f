"""Replicas that tell one another their usage through a real Redis."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.tenancy.metering import Meter, summed
from lora_serve.tenancy.shared import UsageExchange
from lora_serve.tenancy.usage import UsageFigures, UsageJournal, UsageKey
from tests.redis_server import RedisServer

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
