"""Each record of catalog, routes and directory made unreadable in turn: the server starts, refuses in words what the
record was about, serves everything else, frees nothing, and is as before once the record is.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.canary.house import ADMIN, House, running, settings_of
from tests.canary.questions import BASE, TENANTS, World
from tests.hostile.adapter_files import files_of, tar
from tests.hostile.sending import Reply, as_admin, call
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200), pytest.mark.engines("thread")]
BROKEN = b'{"x":1}'
ALIAS = "everybody"


def ask(house: House, model: str, key: str | None = None) -> int:
    """The status of a completion, with the admin's key or another."""
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    named = {} if key is None else {"Authorization": f"Bearer {key}"}
    return as_admin(house, "POST", "/v1/completions", body, **named).status


def upload(house: House, world: World, name: str) -> Reply:
    content = tar(files_of(next(iter(world.adapters.values()))))
    return call(house, "PUT", f"/admin/adapters/{name}", content, dict(ADMIN))


def blobs(store: Path) -> set[str]:
    return {path.name for place in ("blobs", "cache/blobs") for path in (store / place).glob("*")}


def fill(house: House) -> dict[str, str]:
    assert as_admin(house, "PUT", f"/admin/aliases/{ALIAS}", {"target": "acme/a"}).status < 300
    return dict(house.keys)


def check(house: House, world: World, record: str, keys: dict[str, str]) -> None:
    """The record is one of the broken store's."""
    kind, _, name = record.partition(":")
    ids = list(world.adapters)
    key_ids = {secret.split("-")[1]: tenant for tenant, secret in keys.items()}
    shut = name if kind == "tenant" else key_ids.get(name) if kind == "key" else None
    for tenant, secret in keys.items():
        own = next(one for one in ids if one.startswith(f"{tenant}/"))
        expected = 503 if shut == tenant or (kind == "adapter" and own == name) else 200
        assert ask(house, own, secret) == expected, (record, tenant)
    assert ask(house, BASE) == 200
    metrics = call(house, "GET", "/metrics").body.decode()
    is_held = kind in ("adapter", "alias", "tenant", "key")
    assert f"lora_serve_unreadable_records {float(is_held)}" in metrics
    assert not is_held or "cannot be read" in house.logged()
    if kind == "adapter":
        assert ask(house, name) == as_admin(house, "GET", f"/admin/adapters/{name}").status == 503
        assert upload(house, world, name).status == 503
        assert name in as_admin(house, "GET", "/admin/adapters?limit=100").json["unreadable"]
    if kind == "alias" or record == "adapter:acme/a":
        assert ask(house, ALIAS) == upload(house, world, ALIAS).status == 503 if kind == "alias" else True
        assert ask(house, ALIAS) == 503
    if kind == "tenant":
        assert as_admin(house, "POST", "/admin/tenants", {"name": name}).status == 503
        assert as_admin(house, "GET", "/admin/tenants").json["unreadable"] == [name]
        assert as_admin(house, "DELETE", f"/admin/tenants/{name}").status == 200
        assert as_admin(house, "POST", "/admin/tenants", {"name": name}).status == 201
    if kind == "key":
        assert name in as_admin(house, "GET", f"/admin/tenants/{TENANTS[0]}/keys").json["unreadable"]
        assert as_admin(house, "DELETE", f"/admin/tenants/{shut}/keys/{name}").status == 200
        assert ask(house, BASE, keys[str(shut)]) == 401
    if kind in ("adapter", "alias"):
        assert as_admin(house, "DELETE", f"/admin/adapters/{name}").status == 200
        assert upload(house, world, name).status == 201


def rows(store: Path) -> list[tuple[str, str]]:
    found = []
    for file in ("catalog.sqlite3", "tenants.sqlite3"):
        with closing(sqlite3.connect(store / file)) as database:
            found += [(file, row[0]) for row in database.execute("SELECT key FROM records ORDER BY key")]
    return found


def test_each_record_in_sqlite(world: World, tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    with running(settings_of(world, sound)) as house:
        keys = fill(house)
    for number, (file, record) in enumerate(rows(sound)):
        store = Path(shutil.copytree(sound, tmp_path / str(number)))
        with closing(sqlite3.connect(store / file)) as database, database:
            database.execute("UPDATE records SET text = ? WHERE key = ?", (BROKEN.decode(), record))
        for _ in range(2):  # nothing is freed or set aside, at the next start either
            with running(settings_of(world, store), keys) as house:
                assert blobs(store) == blobs(sound), record
                assert not (store / "unnamed").exists()
        with running(settings_of(world, store), keys) as house:
            check(house, world, record, keys)
        shutil.rmtree(store)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


def test_each_record_in_redis(world: World, tmp_path: Path, redis: RedisServer) -> None:
    """A fresh replica; the blobs are in Redis."""
    with running(settings_of(world, tmp_path / "first", redis_url=redis.url)) as house:
        keys = fill(house)
    with redis.client() as client:
        hashes = {name: client.hgetall(f"lora_serve:{name}:records") for name in ("registry", "tenants")}
        dump = {key: client.dump(key) for key in client.scan_iter()}
        chunks = {key for key in dump if b":adapters:" in key and not key.endswith(b":records")}
        for number, (name, record) in enumerate((n, key.decode()) for n in hashes for key in sorted(hashes[n])):
            client.flushall()
            for key, value in dump.items():
                client.restore(key, 0, value)
            client.hset(f"lora_serve:{name}:records", record, BROKEN)
            store = tmp_path / str(number)
            with running(settings_of(world, store, redis_url=redis.url), keys) as house:
                assert chunks <= set(client.scan_iter()), record
                check(house, world, record, keys)
            shutil.rmtree(store)
