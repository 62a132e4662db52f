"""Redis away, slow, emptied, restarted, or full of what nobody of us wrote: what is known is served all the same.

Two replicas and their catch-up: tests/e2e/test_replicas.py, tests/adapters/catalog/test_shared_catalog.py.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.canary.asking import Canaries
from tests.canary.house import House, running, settings_of
from tests.canary.questions import BASE, World
from tests.canary.watch import watching
from tests.faults.injecting import ask, make_cold, register_victim, settle
from tests.hostile.sending import as_admin, post
from tests.oracle import save_adapter
from tests.redis_server import RedisServer
from tests.tiers import mostly_nightly

pytestmark = pytest.mark.engines("thread", nightly=["process"])
PREFIX = "lora_serve"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), append_only=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def folder(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)


@pytest.fixture(scope="module")
def house(world: World, server: RedisServer, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """With room for all adapters in memory, as in a replica that has been up for a while."""
    settings = settings_of(world, tmp_path_factory.mktemp("store"), redis_url=server.url, max_loras=16)
    with running(settings) as house:
        register_victim(house, folder)
        yield house


def register(house: House, folder: Path, name: str) -> int:
    return as_admin(house, "POST", "/admin/adapters", {"id": name, "source": str(folder)}).status


def register_again(house: House, folder: Path, name: str) -> int:
    """The status once Redis is well. A look at it that began before may be noted after `is_back`: a 503 or two."""
    statuses = [503]

    def is_known() -> bool:
        statuses.append(register(house, folder, name))
        return statuses[-1] != 503

    settle(is_known)
    return statuses[-1]


def is_back(house: House) -> bool:
    return not house.services.catalog.is_away


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_redis_that_is_away_disturbs_no_answer_and_refuses_changes(
    house: House, canaries: Canaries, server: RedisServer, folder: Path, how: str
) -> None:
    with watching(house, canaries):
        server.kill() if how == "killed" else server.pause()
        try:
            assert register(house, folder, f"new/{how}") == 503
            assert ask(house).status == 200
        finally:
            server.start() if how == "killed" else server.resume()
        settle(lambda: is_back(house))
    assert register_again(house, folder, f"new/{how}") == 201


def test_redis_that_is_restarted_again_and_again_is_found_again(
    house: House, canaries: Canaries, server: RedisServer, folder: Path
) -> None:
    with watching(house, canaries):
        for number in range(3):
            server.kill()
            server.start()
            settle(lambda: register(house, folder, f"again/{number}") in (200, 201))  # noqa: B023


def test_redis_that_is_slow_delays_changes_and_no_answer(
    house: House, canaries: Canaries, server: RedisServer, folder: Path
) -> None:
    """Every command to it takes more than half a second, for a few seconds."""
    slow = threading.Event()

    def hold() -> None:
        with server.client() as client:
            while not slow.is_set():
                client.client_pause(700)
                slow.wait(0.75)

    with watching(house, canaries):
        thread = threading.Thread(target=hold)
        thread.start()
        try:
            assert register(house, folder, "new/slow") in (200, 201, 503)
            assert [ask(house).status for _ in range(3)] == [200] * 3
        finally:
            slow.set()
            thread.join()
        settle(lambda: is_back(house))
    assert register_again(house, folder, "new/slow") in (200, 201)


def test_server_that_starts_while_redis_is_away_serves_what_it_knew_and_finds_it_again(
    world: World, canaries: Canaries, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path, append_only=True)
    server.start()
    settings = settings_of(world, tmp_path / "store", redis_url=server.url, max_loras=16)
    again = settings_of(world, tmp_path / "store", redis_url=server.url, max_loras=16, lora_modules=())
    try:
        with running(settings) as house:
            keys = house.keys
        server.kill()
        with running(again, keys) as house:
            with watching(house, canaries):
                assert house.services.catalog.is_away
                assert as_admin(house, "DELETE", "/admin/adapters/acme/a").status == 503
                server.start()
                settle(lambda: is_back(house))
            assert as_admin(house, "POST", "/admin/tenants", {"name": "newcomer"}).status == 201
    finally:
        server.stop()


def test_redis_that_was_emptied_is_given_back_what_it_had(
    house: House, canaries: Canaries, server: RedisServer
) -> None:
    before = set(house.services.catalog.snapshot.entries)
    with watching(house, canaries), server.client() as client:
        client.flushall()
        settle(lambda: client.hlen(f"{PREFIX}:registry:records") >= len(before))
        settle(lambda: set(house.services.catalog.snapshot.entries) == before)
    assert ask(house).status == 200


def _wrong_type(client: redis.Redis, key: str) -> None:
    client.delete(key)
    client.lpush(key, "garbage")


DAMAGES: dict[str, Callable[[redis.Redis], object]] = {
    "position_of_another_type": lambda c: _wrong_type(c, f"{PREFIX}:registry:position"),
    "records_of_another_type": lambda c: _wrong_type(c, f"{PREFIX}:registry:records"),
    "changes_of_another_type": lambda c: _wrong_type(c, f"{PREFIX}:registry:changes"),
    "generation_of_words": lambda c: c.hset(f"{PREFIX}:registry:position", "generation", "many"),
    "generation_gone": lambda c: c.hdel(f"{PREFIX}:registry:position", "generation"),
    "epoch_gone": lambda c: c.hdel(f"{PREFIX}:registry:position", "epoch"),
    "epoch_of_bytes": lambda c: c.hset(f"{PREFIX}:registry:position", "epoch", b"\xff\xfe"),
    "generation_huge": lambda c: c.hset(f"{PREFIX}:registry:position", "generation", "9" * 30),
    "generation_back": lambda c: c.hset(f"{PREFIX}:registry:position", "generation", "1"),
    "records_of_garbage": lambda c: c.hset(
        f"{PREFIX}:registry:records",
        mapping={b"adapter:\xff": b"\xff", "adapter:x": "[" * 5000, "alias:y": "{}", "blob:z": "null", "": ""},
    ),
    "records_that_lie": lambda c: c.hset(
        f"{PREFIX}:registry:records",
        "adapter:evil/x",
        json.dumps({"name": "../../evil", "tenant": "acme", "versions": [], "route": {"version": 1}}),
    ),
}


@pytest.mark.parametrize("name", mostly_nightly(DAMAGES, "position_of_another_type", "records_of_garbage"))
def test_registry_records_that_nobody_of_us_wrote_change_no_answer(
    house: House, canaries: Canaries, server: RedisServer, folder: Path, name: str
) -> None:
    before = set(house.services.catalog.snapshot.entries)
    with server.client() as client:
        kept = {key: client.dump(key) for key in client.scan_iter(f"{PREFIX}:registry:*")}
        with watching(house, canaries) as watch:
            watch.expected_in_log = ["catalog", "request"]
            DAMAGES[name](client)
            assert ask(house).status == 200
            assert register(house, folder, "new/meanwhile") in (201, 200, 503)
            assert ask(house).status == 200
            for key, content in kept.items():
                client.restore(key, 0, content, replace=True)
            settle(lambda: is_back(house) and before <= set(house.services.catalog.snapshot.entries))
    assert register_again(house, folder, f"after/{name}") == 201


OTHERS: dict[str, Callable[[redis.Redis, bytes], object]] = {
    "of_another_type": lambda client, key: (client.delete(key), client.rpush(key, "x")),
    "a_text": lambda client, key: client.set(key, b"\xff{["),
    "gone": lambda client, key: client.delete(key),
}


SPOILT = [(kind, how) for kind in ("tenants", "usage", "audit", "rate") for how in OTHERS]


@pytest.mark.many(2)
@pytest.mark.parametrize(("kind", "how"), mostly_nightly(SPOILT, *SPOILT[::4], SPOILT[-1]))
def test_what_else_is_in_redis_may_be_spoilt_without_an_answer_that_changes(
    house: House, canaries: Canaries, server: RedisServer, kind: str, how: str
) -> None:
    """Tenants and keys, usage, the audit log, counters of limits: what is known here counts on."""
    with watching(house, canaries) as watch, server.client() as client:
        watch.expected_in_log = ["usage", "audit", "tenant"]
        limited = limited_key(house)
        watch.secrets.append(limited["Authorization"].split()[1])
        assert ask_as(house, limited) == 200
        settle(lambda: any(client.scan_iter(f"{PREFIX}:{kind}:*")))  # usage comes once a second
        keys = list(client.scan_iter(f"{PREFIX}:{kind}:*"))
        kept = {key: client.dump(key) for key in keys}
        for key in keys:
            OTHERS[how](client, key)
        assert [ask_as(house, limited) for _ in range(3)] == [200] * 3
        assert as_admin(house, "GET", "/admin/usage").status in (200, 503)
        assert as_admin(house, "GET", "/admin/audit").status in (200, 503)
        for key, content in kept.items():
            if content is not None:
                client.restore(key, 0, content, replace=True)
        settle(lambda: not house.services.keys.directory.ledger.is_away)
        assert ask_as(house, limited) == 200
        settle(lambda: as_admin(house, "DELETE", "/admin/tenants/limited").status < 300)


def limited_key(house: House) -> dict[str, str]:
    """Headers of a caller whose limits are counted in Redis."""
    quota = {"requests_per_minute": 100}
    settle(lambda: as_admin(house, "POST", "/admin/tenants", {"name": "limited", "quota": quota}).status in (201, 409))
    reply = as_admin(house, "POST", "/admin/tenants/limited/keys", {"label": "x"})
    assert reply.status == 201, reply.body
    return {"Authorization": f"Bearer {reply.json['secret']}"}


def ask_as(house: House, key: dict[str, str]) -> int:
    return post(house, "/v1/completions", {"model": BASE, "prompt": "x", "max_tokens": 2}, key).status


BLOBS: dict[str, Callable[[dict[str, Any]], object]] = {
    "parent": lambda manifest: {"../../evil": {"size": 4, "chunks": 1}},
    "absolute": lambda manifest: {"/tmp/evil": {"size": 4, "chunks": 1}},
    "many_chunks": lambda manifest: {name: {"size": 4, "chunks": 10**12} for name in manifest},
    "negative": lambda manifest: {name: {"size": -1, "chunks": -1} for name in manifest},
    "words": lambda manifest: {name: {"size": "4", "chunks": "1"} for name in manifest},
    "list": lambda manifest: [],
    "number": lambda manifest: 7,
    "nothing": lambda manifest: {},
    "larger": lambda manifest: {name: {**file, "size": file["size"] + 1} for name, file in manifest.items()},
}


@pytest.mark.parametrize("name", mostly_nightly(BLOBS, "parent", "larger"))
def test_stored_blob_in_redis_that_lies_is_never_served(
    house: House, canaries: Canaries, server: RedisServer, name: str
) -> None:
    """To a replica that has nothing on its own disk."""
    with watching(house, canaries) as watch, server.client() as client:
        watch.expected_in_log = ["request", "adapter"]
        make_cold(house)
        assert ask(house).status == 200  # what a registration has read lies at hand for one load
        blob = make_cold(house)
        if blob.exists():
            shutil.rmtree(blob)
        key = f"{PREFIX}:adapters:{blob.name}:manifest"
        sound = client.get(key)
        client.set(key, json.dumps(BLOBS[name](json.loads(sound))))
        assert ask(house).status == 503
        client.set(key, sound)
        assert ask(house).status == 200
    assert not Path("/tmp/evil").exists()
