"""A record of the catalog that cannot be read is not taken for absent: its name is held until a person mends it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.catalog.state import BLOB
from lora_serve.adapters.maintenance.rebuild import rebuild_folder, rebuild_redis
from lora_serve.adapters.maintenance.rebuild_plan import RebuildOutcome
from lora_serve.adapters.maintenance.registries import open_registry
from lora_serve.adapters.storage import AdapterStorage, open_storage
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.cli import main
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterNotFoundError, AdapterUnavailableError, UnreadableRecordError
from lora_serve.core.model_spec import ModelSpec
from tests import registries
from tests.fake_verifier import FakeVerifier
from tests.redis_server import RedisServer
from tests.verifying_registry import VerifyingRegistry

HELD = "acme/x"


def spoil(store: Path, record: str, text: str = '{"x":1}') -> None:
    with closing(sqlite3.connect(store / "catalog.sqlite3")) as database, database:
        assert database.execute("UPDATE records SET text = ? WHERE key = ?", (text, record)).rowcount == 1


@pytest.fixture
def filled(config: AdapterConfig) -> AdapterConfig:
    registries.fill(config.store)
    return config


def started(storage: AdapterStorage, config: AdapterConfig, spec: ModelSpec) -> VerifyingRegistry:
    registry = VerifyingRegistry(config, spec, storage.catalog, storage.store, FakeVerifier())
    registry.sweep()
    return registry


def refused(registry: VerifyingRegistry, storage: AdapterStorage) -> None:
    catalog = storage.catalog
    for name in (HELD, f"{HELD}@1", "live", "first"):
        with pytest.raises(UnreadableRecordError, match="cannot be read"):
            catalog.resolve(name)
    with pytest.raises(UnreadableRecordError):
        catalog.resolve("x", "acme")  # the tenant's own, which comes before everybody's
    with pytest.raises(AdapterNotFoundError):
        catalog.resolve(HELD, "globex")  # who is told of no other tenant's names
    for act in (
        lambda: Registration(id=HELD).check(storage.catalog.snapshot),
        lambda: catalog.set_route(HELD, 1, None),
        lambda: registry.delete(HELD, 1),
        lambda: catalog.set_alias(HELD, "y"),
        lambda: catalog.set_alias("other", HELD),
    ):
        with pytest.raises(UnreadableRecordError):
            act()
    assert catalog.resolve("y").entry.tenant == "globex"


@pytest.mark.parametrize("text", ['{"x":1}', "", "[" * 5000])
def test_unreadable_id_is_held_and_its_blobs_stay(
    filled: AdapterConfig, spec: ModelSpec, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    blobs = DiskStore(filled.store).digests()
    spoil(filled.store, f"adapter:{HELD}", text)
    with open_storage(filled) as storage:
        registry = started(storage, filled, spec)
        refused(registry, storage)
        assert f"the record of the adapter '{HELD}' cannot be read" in caplog.text
        for digest in registry.delete("y"):  # its content is also a version of what nobody can read
            assert not registry.collect(digest)
    with open_storage(filled) as storage:
        started(storage, filled, spec)
        assert storage.disk.digests() == blobs
        assert list(storage.disk.orphans.all()) == []


def test_rebuild_names_the_held_id_and_makes_it_again(
    filled: AdapterConfig, spec: ModelSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_registry(registries.at(filled.store), is_source=True) as place:
        before = registries.content_of(place.catalog)
    spoil(filled.store, f"adapter:{HELD}")
    with open_storage(filled) as storage:
        started(storage, filled, spec)
    assert main(["registry", "rebuild", "--store", str(filled.store), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "the catalog was damaged" in said
    assert HELD in said
    rebuilt = rebuild_folder(filled.store, [], False, lambda done, total: None)
    assert {one.name for one in rebuilt.plan.ids if one.outcome is RebuildOutcome.RESTORED} == {HELD}
    with open_registry(registries.at(filled.store), is_source=True) as place:
        assert registries.content_of(place.catalog) == before


def test_admin_frees_a_held_id_with_its_blobs(filled: AdapterConfig, spec: ModelSpec) -> None:
    spoil(filled.store, f"adapter:{HELD}")
    with open_storage(filled) as storage:
        registry = started(storage, filled, spec)
        gone = registry.delete(HELD)
        assert all(registry.collect(digest) for digest in gone)
        assert storage.store.digests() == storage.catalog.snapshot.digests
        Registration(id=HELD).check(storage.catalog.snapshot)
        with pytest.raises(AdapterNotFoundError):
            storage.catalog.resolve("live")


def test_rebuild_frees_a_held_id_of_which_nothing_is_left(filled: AdapterConfig) -> None:
    with open_registry(registries.at(filled.store), is_source=True) as place:
        place.catalog.ledger.change(lambda state: ({"adapter:nobody/z": "?", "alias:lost": "{}"}, None))
        assert place.catalog.snapshot.held == {"nobody/z", "lost"}
    rebuilt = rebuild_folder(filled.store, [], False, lambda done, total: None)
    assert [one.name for one in rebuilt.plan.ids if one.outcome is RebuildOutcome.LOST] == ["lost", "nobody/z"]
    with closing(open_catalog(filled.store)) as catalog:
        assert catalog.snapshot.held == frozenset()


def test_lease_that_cannot_be_read_lets_nobody_free_or_take_the_blob(filled: AdapterConfig) -> None:
    with closing(open_catalog(filled.store)) as catalog:
        digest = catalog.entry("initech/z").default.digest
        catalog.ledger.change(lambda state: ({BLOB + digest: '{"x":1}'}, None))
        catalog.remove("initech/z")
        assert not catalog.leases.release(digest, catalog.leases.drain_holder)
        with pytest.raises(AdapterUnavailableError):
            catalog.leases.acquire(digest, wait_seconds=0)


def test_fresh_replica_holds_what_is_broken_in_redis(config: AdapterConfig, spec: ModelSpec, tmp_path: Path) -> None:
    """Bytes that are no text are one broken record too."""
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        registries.fill(redis.url)
        with redis.client() as client:
            client.hset("lora_serve:registry:records", f"adapter:{HELD}", b"\xff\xfe")
        with open_storage(replace(config, redis_url=redis.url)) as storage:
            registry = started(storage, config, spec)
            refused(registry, storage)
            far = storage.store.far.digests()  # type: ignore[attr-defined]
            for digest in registry.delete("y"):
                assert not registry.collect(digest)
            assert storage.store.far.digests() == far  # type: ignore[attr-defined]
        rebuilt = rebuild_redis(registries.at(redis.url), [], False, lambda done, total: None)
        assert rebuilt.was == "damaged"
        with open_registry(registries.at(redis.url), is_source=True) as place:
            assert place.catalog.resolve("live").entry.name == HELD
    finally:
        redis.stop()
