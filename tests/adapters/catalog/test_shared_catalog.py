"""Catalogs of several servers on one real redis-server: what one writes the others know, whatever happens to Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import Canary
from lora_serve.adapters.catalog.journals import redis as redis_journal
from lora_serve.adapters.catalog.ledger import Follower
from lora_serve.adapters.catalog.opening import MIRROR_NAME, open_catalog
from lora_serve.core.errors import AdapterNotFoundError, AdapterUnavailableError
from tests.catalog_versions import digest, version
from tests.redis_server import RedisServer

OpenServer = Callable[[str], Catalog]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """Seconds until `condition` holds."""
    start, pause = time.monotonic(), threading.Event()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        pause.wait(0.01)
    return time.monotonic() - start


@pytest.fixture
def open_server(own_redis: RedisServer, tmp_path: Path) -> Iterator[OpenServer]:
    """A catalog with its follower, in a store folder of the given name."""
    with ExitStack() as stack:

        def make(name: str) -> Catalog:
            catalog = stack.enter_context(closing(open_catalog(tmp_path / name, own_redis.url)))
            follower = stack.enter_context(closing(Follower(catalog.ledger, lambda: None)))
            follower.start()
            return catalog

        yield make


@pytest.fixture
def two(open_server: OpenServer) -> tuple[Catalog, Catalog]:
    return open_server("a"), open_server("b")


def test_what_one_server_changes_the_other_knows_at_once(two: tuple[Catalog, Catalog]) -> None:
    one, other = two
    Registration(id="acme/x").commit(one.ledger, version("a"))
    assert until(lambda: "acme/x" in other.snapshot.entries) < 2
    Registration(id="acme/x", activate=False).commit(other.ledger, version("b"))
    other.set_route("acme/x", None, Canary(2, 50.0))
    other.set_alias("live", "acme/x@2")
    until(lambda: one.snapshot == other.snapshot)
    assert one.resolve("live").ref.digest == digest("b")
    one.remove("acme/x")
    assert until(lambda: not other.snapshot.entries) < 2
    assert other.snapshot.aliases == {}


def test_changes_made_at_the_same_time_are_all_kept_and_numbered_apart(two: tuple[Catalog, Catalog]) -> None:
    def write(catalog: Catalog, letters: str) -> None:
        for letter in letters:
            Registration(id="x").commit(catalog.ledger, version(letter))

    threads = [threading.Thread(target=write, args=pair) for pair in zip(two, ("abcdef", "012345"), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: two[0].snapshot == two[1].snapshot)
    versions = two[0].entry("x").versions
    assert [v.version for v in versions] == list(range(1, 13))
    assert {v.digest for v in versions} == {digest(letter) for letter in "abcdef012345"}


def test_act_that_changes_nothing_here_is_tried_on_what_another_server_has_just_written(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    """Neither follows the other: a load balancer may be quicker than the news."""
    with (
        closing(open_catalog(tmp_path / "a", own_redis.url)) as one,
        closing(open_catalog(tmp_path / "b", own_redis.url)) as other,
    ):
        for letter in "ab":
            Registration(id="x").commit(one.ledger, version(letter))
        other.set_route("x", 1, None)  # of an id that it has not heard of
        one.set_route("x", 2, None)  # as it was there before
        assert one.entry("x").default_version == 2
        other.set_pinned("x", True)
        one.set_pinned("x", False)
        other.refresh()
        assert (other.entry("x").default_version, other.entry("x").pinned) == (2, False)


def test_server_that_was_away_catches_up(open_server: OpenServer, own_redis: RedisServer, tmp_path: Path) -> None:
    one = open_server("a")
    Registration(id="x").commit(one.ledger, version("a"))
    with closing(open_catalog(tmp_path / "b", own_redis.url)) as other:
        assert other.resolve("x").ref.version == 1
    Registration(id="x").commit(one.ledger, version("b"))
    Registration(id="y").commit(one.ledger, version("a"))
    one.remove("y")
    with closing(open_catalog(tmp_path / "b", own_redis.url)) as other:
        assert other.snapshot == one.snapshot


def test_damaged_copy_is_set_aside_and_made_anew_of_what_redis_has(own_redis: RedisServer, tmp_path: Path) -> None:
    with closing(open_catalog(tmp_path / "a", own_redis.url)) as one:
        Registration(id="x").commit(one.ledger, version("a"))
        known = one.snapshot
    (tmp_path / "a" / MIRROR_NAME).write_bytes(b"junk" * 4096)
    with closing(open_catalog(tmp_path / "a", own_redis.url)) as again:
        assert again.snapshot == known
    assert (tmp_path / "a" / f"{MIRROR_NAME}.damaged").read_bytes() == b"junk" * 4096


def test_server_that_was_away_longer_than_the_changes_are_kept_reads_everything(
    own_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_journal, "MAX_CHANGES", 1)
    with (
        closing(open_catalog(tmp_path / "a", own_redis.url)) as one,
        closing(open_catalog(tmp_path / "b", own_redis.url)) as other,
    ):
        for number in range(250):  # a stream is cut by whole nodes of 100 entries
            Registration(id=f"x{number % 3}").commit(one.ledger, version("a" if number % 2 else "b"))
        other.refresh()
        assert other.ledger.num_losses == 1
        assert other.snapshot == one.snapshot


def test_while_redis_is_away_what_is_known_is_served_and_changes_are_refused(
    two: tuple[Catalog, Catalog], own_redis: RedisServer
) -> None:
    one, other = two
    Registration(id="x").commit(one.ledger, version("a"))
    until(lambda: "x" in other.snapshot.entries)
    own_redis.kill()
    until(lambda: other.is_away)
    assert other.resolve("x").ref.digest == digest("a")
    for change in (
        lambda: Registration(id="y").commit(other.ledger, version("b")),
        lambda: other.remove("x"),
        lambda: other.set_pinned("x", True),
    ):
        with pytest.raises(AdapterUnavailableError, match=r"registry .*cannot be reached"):
            change()
    until(lambda: _kind_of_refusal(other, "y") is AdapterUnavailableError)  # it may have been registered elsewhere
    own_redis.start()
    assert until(lambda: not other.is_away and not one.is_away) < 5
    assert _kind_of_refusal(other, "y") is AdapterNotFoundError
    Registration(id="y").commit(one.ledger, version("b"))
    until(lambda: other.snapshot == one.snapshot)
    assert other.snapshot.digests == {digest("a"), digest("b")}


def test_redis_that_answers_nothing_is_away_too(two: tuple[Catalog, Catalog], own_redis: RedisServer) -> None:
    one, other = two
    Registration(id="x").commit(one.ledger, version("a"))
    own_redis.pause()
    start = time.monotonic()
    with pytest.raises(AdapterUnavailableError):
        Registration(id="y").commit(one.ledger, version("b"))
    assert time.monotonic() - start < 15
    until(lambda: one.is_away and other.is_away, 10)
    assert one.resolve("x").ref.version == 1
    own_redis.resume()
    assert until(lambda: not one.is_away and not other.is_away) < 5
    until(lambda: one.snapshot == other.snapshot)


def test_server_that_starts_while_redis_is_away_serves_what_it_knew(
    open_server: OpenServer, own_redis: RedisServer, tmp_path: Path
) -> None:
    one = open_server("a")
    Registration(id="x").commit(one.ledger, version("a"))
    with closing(open_catalog(tmp_path / "b", own_redis.url)):
        pass
    own_redis.kill()
    other = open_server("b")
    assert other.resolve("x").ref.digest == digest("a")
    own_redis.start()
    until(lambda: not other.is_away)
    one_again_known = until(lambda: not one.is_away)
    assert one_again_known < 5
    Registration(id="y").commit(one.ledger, version("b"))
    until(lambda: "y" in other.snapshot.entries)


def test_emptied_redis_gets_back_what_the_servers_know(two: tuple[Catalog, Catalog], own_redis: RedisServer) -> None:
    one, other = two
    for letter in "abc":
        Registration(id="x").commit(one.ledger, version(letter))
    one.set_alias("live", "x@2")
    until(lambda: other.snapshot == one.snapshot)
    known = one.snapshot.entries
    with own_redis.client() as client:
        client.flushall()
        until(lambda: client.exists("lora_serve:registry:records") == 1)
    until(lambda: one.snapshot == other.snapshot)
    assert one.snapshot.entries == known
    assert one.snapshot.aliases == {"live": "x@2"}
    Registration(id="y").commit(other.ledger, version("d"))
    until(lambda: "y" in one.snapshot.entries)


def test_server_notes_that_another_one_gave_back_what_redis_had_lost(own_redis: RedisServer, tmp_path: Path) -> None:
    """What it has near may be lost there, too: blobs are given back by whoever has them."""
    with (
        closing(open_catalog(tmp_path / "a", own_redis.url)) as one,
        closing(open_catalog(tmp_path / "b", own_redis.url)) as other,
    ):
        Registration(id="x").commit(one.ledger, version("a"))
        other.ledger.refresh()
        before = other.ledger.num_losses
        with own_redis.client() as client:
            client.flushall()
        one.ledger.refresh()
        other.ledger.refresh()
        assert other.ledger.num_losses == before + 1
        Registration(id="y").commit(one.ledger, version("b"))
        other.ledger.refresh()
        assert other.ledger.num_losses == before + 1
        assert one.snapshot == other.snapshot


def test_redis_set_back_in_time_is_brought_forward_again(two: tuple[Catalog, Catalog], own_redis: RedisServer) -> None:
    one, other = two
    Registration(id="x").commit(one.ledger, version("a"))
    Registration(id="gone").commit(one.ledger, version("b"))
    with own_redis.client() as client:
        keys = [key for key in client.keys("*") if b"registry" in key]
        before = {key: client.dump(key) for key in keys}
        Registration(id="x").commit(one.ledger, version("c"))
        one.remove("gone")
        until(lambda: other.snapshot == one.snapshot)
        known = one.snapshot.entries
        pipe = client.pipeline()
        for key, value in before.items():
            pipe.restore(key, 0, value, replace=True)
        pipe.execute()
        until(lambda: one.ledger.num_losses + other.ledger.num_losses >= 1)
    until(lambda: one.snapshot == other.snapshot and one.snapshot.entries == known)


def test_store_that_is_moved_to_another_registry_does_not_carry_adapters_over(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    with closing(open_catalog(tmp_path / "a", own_redis.url)) as catalog:
        Registration(id="x").commit(catalog.ledger, version("a"))
    with closing(open_catalog(tmp_path / "b", own_redis.url, "elsewhere")) as catalog:
        Registration(id="y").commit(catalog.ledger, version("b"))
    with closing(open_catalog(tmp_path / "a", own_redis.url, "elsewhere")) as catalog:
        assert set(catalog.snapshot.entries) == {"y"}


def test_server_knows_whether_others_share_its_registry(two: tuple[Catalog, Catalog], tmp_path: Path) -> None:
    with closing(open_catalog(tmp_path / "alone")) as alone:
        assert [catalog.is_shared for catalog in (*two, alone)] == [True, True, False]


def test_blob_that_another_server_still_uses_is_deleted_by_the_last_of_them(two: tuple[Catalog, Catalog]) -> None:
    one, other = two
    Registration(id="x").commit(one.ledger, version("a"))
    until(lambda: "x" in other.snapshot.entries)
    one.remove("x")
    until(lambda: "x" not in other.snapshot.entries)
    other.leases.drain(digest("a"))
    assert not one.leases.release(digest("a"), one.leases.drain_holder)
    assert other.leases.release(digest("a"), other.leases.drain_holder)


def test_bytes_that_one_server_deletes_cannot_be_named_by_another_meanwhile(two: tuple[Catalog, Catalog]) -> None:
    one, other = two
    assert one.leases.release(digest("a"), one.leases.acquire(digest("a")))
    with pytest.raises(AdapterUnavailableError, match="being deleted"):
        other.leases.acquire(digest("a"))
    one.leases.deleted(digest("a"))
    Registration(id="x").commit(other.ledger, version("a"), holder=other.leases.acquire(digest("a")))
    until(lambda: "x" in one.snapshot.entries)
    assert not one.leases.release(digest("a"), "nobody")


def test_bytes_that_one_server_could_not_delete_may_be_named_by_another(two: tuple[Catalog, Catalog]) -> None:
    one, other = two
    assert one.leases.release(digest("a"), one.leases.acquire(digest("a")))
    one.leases.deletion_failed(digest("a"))
    Registration(id="x").commit(other.ledger, version("a"), holder=other.leases.acquire(digest("a")))
    until(lambda: "x" in one.snapshot.entries)
    assert not one.leases.release(digest("a"), one.leases.drain_holder)


def test_record_that_nobody_of_us_wrote_is_left_out(two: tuple[Catalog, Catalog], own_redis: RedisServer) -> None:
    one, other = two
    Registration(id="x").commit(one.ledger, version("a"))
    until(lambda: "x" in other.snapshot.entries)
    with own_redis.client() as client:
        client.hset("lora_serve:registry:records", mapping={"adapter:bad": "{", "adapter:z": "[]", "what:ever": "1"})
        client.hset("lora_serve:registry:records", "adapter:y", client.hget("lora_serve:registry:records", "adapter:x"))
    with closing(open_catalog(Path(str(own_redis._folder)) / "c", own_redis.url)) as third:
        assert set(third.snapshot.entries) == {"x"}


def _kind_of_refusal(catalog: Catalog, name: str) -> type[Exception]:
    with pytest.raises((AdapterNotFoundError, AdapterUnavailableError)) as caught:
        catalog.resolve(name)
    return caught.type
