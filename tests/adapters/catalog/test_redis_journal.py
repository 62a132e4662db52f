"""The shared journal among things that somebody else writes into its keys: it goes on, and loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.journals.redis import RedisJournal
from tests.redis_server import RedisServer
from tests.tiers import mostly_nightly

PREFIX = "t:registry"
MAX_ID = "18446744073709551615-18446744073709551615"


@pytest.fixture
def client(redis_url: str, shared_redis: RedisServer) -> Iterator[redis.Redis]:
    with shared_redis.client() as client:
        yield client


@pytest.fixture
def two(redis_url: str) -> Iterator[tuple[RedisJournal, RedisJournal]]:
    with closing(RedisJournal(redis_url, "t")) as one, closing(RedisJournal(redis_url, "t")) as other:
        yield one, other


def _wrong(client: redis.Redis, key: str) -> None:
    client.delete(key)
    client.rpush(key, "junk")


def _top_id_taken_and_gone(client: redis.Redis) -> None:
    client.xadd(f"{PREFIX}:changes", {"x": "junk"}, id=MAX_ID)
    client.xdel(f"{PREFIX}:changes", MAX_ID)


HINTS: dict[str, Callable[[redis.Redis], Any]] = {
    "id_of_now": lambda c: c.xadd(f"{PREFIX}:changes", {"x": "junk"}),
    "highest_id": lambda c: c.xadd(f"{PREFIX}:changes", {"x": "junk"}, id=MAX_ID),
    "highest_id_that_is_gone_again": _top_id_taken_and_gone,
    "next_id": lambda c: c.xadd(f"{PREFIX}:changes", {"keys": "[]"}, id="3-0"),
    "number_behind_ours": lambda c: c.xadd(f"{PREFIX}:changes", {"keys": '["a"]'}, id="2-7"),
    "keys_that_are_none": lambda c: c.xadd(f"{PREFIX}:changes", {"keys": "[" * 9999}, id="9-0"),
    "keys_of_objects": lambda c: c.xadd(f"{PREFIX}:changes", {"keys": '[{"a": 1}]'}, id="9-0"),
    "changes_of_another_type": lambda c: _wrong(c, f"{PREFIX}:changes"),
    "heads_of_another_type": lambda c: _wrong(c, f"{PREFIX}:heads"),
    "heads_of_garbage": lambda c: c.hset(f"{PREFIX}:heads", mapping={"x": "y", b"\xff": b"\xff", "z": "9" * 40}),
    "no_changes": lambda c: c.delete(f"{PREFIX}:changes"),
    "no_heads": lambda c: c.delete(f"{PREFIX}:heads"),
}
POSITIONS: dict[str, Callable[[redis.Redis], Any]] = {
    "position_of_another_type": lambda c: _wrong(c, f"{PREFIX}:position"),
    "position_gone": lambda c: c.delete(f"{PREFIX}:position"),
    "generation_of_words": lambda c: c.hset(f"{PREFIX}:position", "generation", "many"),
    "generation_gone": lambda c: c.hdel(f"{PREFIX}:position", "generation"),
    "generation_huge": lambda c: c.hset(f"{PREFIX}:position", "generation", "9" * 30),
    "generation_at_its_end": lambda c: c.hset(f"{PREFIX}:position", "generation", str(2**62)),
    "epoch_gone": lambda c: c.hdel(f"{PREFIX}:position", "epoch"),
    "epoch_of_bytes": lambda c: c.hset(f"{PREFIX}:position", "epoch", b"\xff\xfe"),
}


@pytest.mark.many(5)
@pytest.mark.parametrize("name", HINTS)
def test_junk_among_the_changes_stops_no_commit_and_no_follower(
    two: tuple[RedisJournal, RedisJournal], client: redis.Redis, name: str
) -> None:
    one, other = two
    position = one.commit(Position(), {"a": "1", "b": "1"})
    assert position is not None
    position = one.commit(position, {"b": "2"})
    assert position is not None
    followed = other.load().position
    HINTS[name](client)
    position = one.commit(position, {"a": "2", "c": "1"})
    assert position is not None, "the commit is done"
    page = other.since(followed) or other.load()
    assert page.position == position
    assert {"a": "2", "c": "1"}.items() <= dict(page.records).items()
    assert one.load().records == other.load().records == {"a": "2", "b": "2", "c": "1"}
    before = other.load().position
    for number in range(3):  # all is as ever: what is new comes alone, and is waited for
        position = one.commit(position, {"d": str(number)})
        assert position is not None
        page = other.since(before)
        if page is None:
            assert number == 0, "all is looked at once"
            page = other.load()
        assert page.records["d"] == str(number)
        before = page.position
    assert_waits(other, before)


@pytest.mark.parametrize("name", mostly_nightly(HINTS, *list(HINTS)[::4]))
def test_junk_is_dropped_by_whoever_only_follows(
    two: tuple[RedisJournal, RedisJournal], client: redis.Redis, name: str
) -> None:
    one, other = two
    position = one.commit(Position(), {"a": "1"})
    assert position is not None
    position = one.commit(position, {"b": "2"})
    assert position is not None
    HINTS[name](client)
    page = other.since(position) or other.load()
    assert page.position == position
    again = other.since(position)
    assert again is not None
    assert again.records == {}
    assert_waits(other, position)


def assert_waits(journal: RedisJournal, position: Position) -> None:
    """Nothing makes it return at once, again and again."""
    returned = threading.Event()
    thread = threading.Thread(target=lambda: (journal.wait(position, 0.3), returned.set()))
    thread.start()
    assert not returned.wait(0.1)
    thread.join()


@pytest.mark.parametrize("name", POSITIONS)
def test_position_that_is_none_is_made_anew_over_the_records_as_they_are(
    two: tuple[RedisJournal, RedisJournal], client: redis.Redis, name: str
) -> None:
    one, other = two
    position = one.commit(Position(), {"a": "1", "b": "1"})
    assert position is not None
    POSITIONS[name](client)
    for journal in (one, other, one):
        page = journal.load()
        assert {"a": "1", "b": "1"}.items() <= dict(page.records).items()
        position = journal.commit(page.position, {"c": name})
        assert position is not None
        assert journal.load().records["c"] == name
    position = one.load().position
    assert one.commit(position, {"c": None}) is not None
    assert other.load().records == {"a": "1", "b": "1"}


def test_records_of_another_type_take_nothing_half(two: tuple[RedisJournal, RedisJournal], client: redis.Redis) -> None:
    one, _ = two
    position = one.commit(Position(), {"a": "1"})
    assert position is not None
    _wrong(client, f"{PREFIX}:records")
    before = client.hgetall(f"{PREFIX}:position")
    with pytest.raises(Exception, match="cannot be reached"):
        one.commit(position, {"a": "2"})
    assert client.hgetall(f"{PREFIX}:position") == before
    assert one.load().position == Position(), "whoever has a copy gives it back"


def test_names_of_commits_are_kept_for_a_while_only(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_serve.adapters.catalog.journals import redis as module

    monkeypatch.setattr(module, "MAX_HEADS", 20)
    monkeypatch.setattr(module, "_TRIM", 5)
    with closing(RedisJournal(redis_url, "t")) as journal:
        position = Position()
        for number in range(60):
            following = journal.commit(position, {"a": str(number)})
            assert following is not None
            position = following
        assert 20 <= client.hlen(f"{PREFIX}:heads") <= 25
        assert position.head in journal.load().heads


def test_only_records_without_a_position_have_lost_it(
    two: tuple[RedisJournal, RedisJournal], client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = two
    assert one.load().position == Position()
    assert not caplog.records, "nothing was ever there"
    position = one.commit(Position(), {"a": "1"})
    assert position is not None
    client.delete(f"{PREFIX}:position")
    page = other.load()
    assert page.records == {"a": "1"}
    assert page.position.epoch not in ("", position.epoch)
    assert "had lost its position" in caplog.text


def test_names_of_commits_whose_numbers_are_none_are_left_out(
    two: tuple[RedisJournal, RedisJournal], client: redis.Redis
) -> None:
    one, _ = two
    position = one.commit(Position(), {"a": "1"})
    assert position is not None
    client.hset(f"{PREFIX}:heads", mapping={"x": "y", "z": "9" * 40})
    assert one.load().heads == {position.head: 1}
