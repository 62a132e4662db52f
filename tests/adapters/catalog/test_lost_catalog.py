"""A catalog that is lost, damaged or set back: no server runs on it, and no blob that it does not know is deleted."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from lora_serve.adapters.catalog.blob_records import BlobRecord, key_of, record_of, sync_records, text_of
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.maintenance.rebuild import rebuild_folder
from lora_serve.adapters.maintenance.registries import open_registry
from lora_serve.adapters.storage import open_storage
from lora_serve.adapters.stores import disk_tables
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.cli import main
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, ConfigError
from lora_serve.core.model_spec import ModelSpec
from tests import registries
from tests.fake_verifier import FakeVerifier
from tests.verifying_registry import VerifyingRegistry

CATALOG = "catalog.sqlite3"


@pytest.fixture
def filled(config: AdapterConfig) -> AdapterConfig:
    """A store with three ids."""
    registries.fill(config.store)
    return config


def lose(store: Path) -> None:
    for path in store.glob(f"{CATALOG}*"):
        path.unlink()


def empty(store: Path) -> None:
    lose(store)
    (store / CATALOG).touch()


def cut(store: Path) -> None:
    os.truncate(store / CATALOG, 6000)


def zero_a_page(store: Path) -> None:
    """The one in the middle."""
    with (store / CATALOG).open("r+b") as file:
        num_pages = (store / CATALOG).stat().st_size // 4096
        file.seek(4096 * (num_pages // 2))
        file.write(bytes(4096))


def be_no_database(store: Path) -> None:
    (store / CATALOG).write_bytes(b"not a database" * 100)


def blobs_in(store: Path) -> set[str]:
    return {path.name for path in (store / "blobs").iterdir()}


@pytest.mark.parametrize("damage", [lose, empty, cut, zero_a_page, be_no_database])
def test_start_without_its_catalog_is_refused_in_words_and_touches_nothing(
    filled: AdapterConfig, damage: Callable[[Path], None]
) -> None:
    before = blobs_in(filled.store)
    damage(filled.store)
    for _ in range(2):
        with pytest.raises(ConfigError, match="lora-serve registry rebuild --store"), open_storage(filled):
            pass
        assert blobs_in(filled.store) == before


def test_refused_start_makes_no_file(filled: AdapterConfig, capsys: pytest.CaptureFixture[str]) -> None:
    lose(filled.store)
    for name in ("replica", "lock"):
        (filled.store / name).unlink(missing_ok=True)
    before = sorted(filled.store.rglob("*"))
    with pytest.raises(ConfigError, match="begins empty and keeps the blobs aside"), open_storage(filled):
        pass
    with pytest.raises(ConfigError, match="there are 4 blobs"), open_registry(registries.at(filled.store), False):
        pass
    assert sorted(filled.store.rglob("*")) == before
    assert main(["registry", "show", "--store", str(filled.store)]) == 2
    assert "there is no registry" in capsys.readouterr().err


def test_lost_catalog_of_one_blob_is_told_in_the_singular(filled: AdapterConfig) -> None:
    lose(filled.store)
    for path in list((filled.store / "blobs").iterdir())[1:]:
        shutil.rmtree(path)
    with pytest.raises(ConfigError, match="there is 1 blob and no catalog of it"), open_storage(filled):
        pass


def test_start_on_an_older_copy_of_the_catalog_is_refused(filled: AdapterConfig) -> None:
    shutil.copyfile(filled.store / CATALOG, filled.store / "older")
    with open_registry(registries.at(filled.store), is_source=False) as place:
        place.catalog.set_pinned("y", True)  # no blob came or went
    os.replace(filled.store / "older", filled.store / CATALOG)
    with pytest.raises(ConfigError, match=r"older than 1 of the 4 blobs.*registry accept"), open_storage(filled):
        pass


def test_record_that_is_too_large_counts_like_one_that_makes_no_sense(filled: AdapterConfig) -> None:
    for path in filled.store.glob("blobs/*/named-*.json"):
        os.truncate(path, disk_tables.MAX_BYTES + 1)
    with open_storage(filled) as storage:
        assert len(storage.catalog.snapshot.entries) == 3
    lose(filled.store)
    rebuilt = rebuild_folder(filled.store, [], True, lambda done, total: None)
    assert len(rebuilt.aside) == 4


def test_new_store_and_one_that_was_never_lost_are_opened(filled: AdapterConfig, tmp_path: Path) -> None:
    with open_storage(filled) as storage:
        assert len(storage.catalog.snapshot.entries) == 3
    with open_storage(
        AdapterConfig(store=tmp_path / "new", max_loras=4, max_lora_rank=64, adapter_host_memory=1, max_upload_size=1)
    ) as storage:
        assert not storage.catalog.snapshot.entries


def test_start_reads_no_blob_unless_the_catalog_is_at_another_position(
    filled: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    records = DiskStore.records

    def noting(store: DiskStore, digests: Collection[str]) -> dict[str, dict[str, str]]:
        read.extend(digests)
        return records(store, digests)

    monkeypatch.setattr(DiskStore, "records", noting)
    with open_storage(filled) as storage:  # noted by no server so far
        assert set(read) == storage.disk.digests()
        storage.catalog.set_alias("live", "initech/z")
    shutil.copyfile(filled.store / CATALOG, filled.store / "older")
    read.clear()
    with open_storage(filled) as storage:
        assert not read
        storage.catalog.keep_blob_records(storage.store)
        storage.catalog.set_alias("newer", "initech/z")
    os.replace(filled.store / "older", filled.store / CATALOG)
    with pytest.raises(ConfigError, match="older than"), open_storage(filled):
        pass
    assert read


@pytest.mark.parametrize("damage", [lose, empty])
def test_sweep_on_a_catalog_that_was_begun_anew_deletes_nothing(
    filled: AdapterConfig, spec: ModelSpec, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    before = blobs_in(filled.store)
    damage(filled.store)
    with closing(open_catalog(filled.store)) as catalog:
        registry = VerifyingRegistry(filled, spec, catalog, DiskStore(filled.store), FakeVerifier())
        registry.sweep()
        assert blobs_in(filled.store) == before
        catalog.leases.deleted(catalog.leases.acquire("sha256:" + "0" * 64) and "sha256:" + "0" * 64)
        VerifyingRegistry(filled, spec, catalog, DiskStore(filled.store), FakeVerifier()).sweep()
    aside = list(DiskStore(filled.store).orphans.all())
    assert {digest.removeprefix("sha256:") for digest, _ in aside} == before
    assert all(disk_tables.read_records(path) for _, path in aside)
    assert "registry rebuild" in caplog.text
    (told,) = [line for line in caplog.messages if "kept aside in" in line][:1]
    assert all(f"sha256:{name}" in told for name in before)


def test_crash_leftovers_are_freed_as_ever(filled: AdapterConfig, spec: ModelSpec) -> None:
    """Of a deletion that was under way, and of two registrations of the same content that were."""
    with open_registry(registries.at(filled.store), is_source=False) as place:
        (deleted,) = place.catalog.remove("initech/z")
    with closing(open_catalog(filled.store)) as catalog:
        coming = "sha256:" + "7" * 64
        for _ in range(2):
            catalog.leases.acquire(coming)
        (filled.store / "blobs" / ("7" * 64)).mkdir()
    with closing(open_catalog(filled.store)) as catalog:
        registry = VerifyingRegistry(filled, spec, catalog, DiskStore(filled.store), FakeVerifier())
        registry.sweep()
        assert coming not in catalog.ledger.state.leases
    left = blobs_in(filled.store)
    assert not {deleted.removeprefix("sha256:"), "7" * 64} & left
    assert len(left) == 3
    assert not (filled.store / "unnamed").exists()


def test_note_of_an_older_catalog_gives_no_right_to_what_came_after_it(filled: AdapterConfig, spec: ModelSpec) -> None:
    with open_registry(registries.at(filled.store), is_source=False) as place:
        digest = place.catalog.snapshot.entries["initech/z"].default.digest
        registries.remove(place, "initech/z")
        place.catalog.leases.acquire(digest)
    shutil.copyfile(filled.store / CATALOG, filled.store / "older")
    with open_registry(registries.at(filled.store), is_source=False) as place:
        registries.put(place, "initech/z", "five")
    os.replace(filled.store / "older", filled.store / CATALOG)
    with closing(open_catalog(filled.store)) as catalog:
        VerifyingRegistry(filled, spec, catalog, DiskStore(filled.store), FakeVerifier()).sweep()
        assert [found for found, _ in DiskStore(filled.store).orphans.all()] == [digest]


def test_id_whose_record_makes_no_sense_keeps_its_blob(filled: AdapterConfig, spec: ModelSpec) -> None:
    """Even if a server died while it was about to name the same content."""
    with closing(open_catalog(filled.store)) as catalog:
        catalog.leases.acquire(catalog.entry("initech/z").default.digest)
    with closing(sqlite3.connect(filled.store / CATALOG)) as database, database:
        database.execute("UPDATE records SET text = '{' WHERE key = 'adapter:initech/z'")
    with open_storage(filled) as storage:
        digest = storage.catalog.ledger.state.leases.keys() - storage.catalog.snapshot.digests
        VerifyingRegistry(filled, spec, storage.catalog, storage.store, FakeVerifier()).sweep()
        assert list(storage.disk.orphans.all()) == []
        assert next(iter(storage.store.records(digest).values())).keys() == {key_of("initech/z")}


def test_what_is_kept_aside_goes_when_its_term_is_over_and_not_before(
    filled: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(filled.store)
    num_blobs = len(store.digests())
    assert store.sweep(frozenset(), lambda *_: False, 30) == num_blobs
    now = disk_tables.time.time()
    for days, left in ((29.9, num_blobs), (30.1, 0)):
        monkeypatch.setattr(disk_tables.time, "time", lambda days=days: now + 86400 * days)
        assert store.sweep(frozenset(), lambda *_: False, 0) == num_blobs  # 0: for ever
        assert store.sweep(frozenset(), lambda *_: False, 30) == left
        assert DiskStore(filled.store).sweep(frozenset(), lambda *_: False, 30) == left


def test_same_blob_may_be_set_aside_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for _ in range(3):
        (tmp_path / "blobs" / ("1" * 64)).mkdir()
        store.sweep(frozenset(), lambda *_: False)
    assert len(list(store.orphans.all())) == 3


def test_blobs_that_cannot_be_read_are_not_set_aside_as_broken(
    filled: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(filled.store)
    before = store.digests()

    def fail(path: Path) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("lora_serve.adapters.stores.disk.read_header", fail)
        patched.setattr("lora_serve.adapters.stores.disk.check_files", fail)
        store.sweep(before, lambda *_: False)
    assert store.digests() == before


def test_each_change_of_an_id_is_beside_its_blobs_before_it_is_acknowledged(filled: AdapterConfig) -> None:
    with open_registry(registries.at(filled.store), is_source=False) as place:
        for act in (
            lambda catalog: catalog.set_pinned("acme/x", False),
            lambda catalog: catalog.set_sharing("acme/x", ["globex"]),
            lambda catalog: catalog.set_route("acme/x", 3, None),
            lambda catalog: catalog.roll_back("acme/x"),
            lambda catalog: catalog.set_alias("other", "acme/x"),
            lambda catalog: catalog.set_alias("other", "y"),
            lambda catalog: catalog.remove_alias("live"),
            lambda catalog: catalog.remove("acme/x", 4),
        ):
            act(place.catalog)
            assert_newest_records_say_what_the_catalog_does(place.catalog, filled.store)


def assert_newest_records_say_what_the_catalog_does(catalog: Catalog, store: Path) -> None:
    found = [
        record_of(text) for path in (store / "blobs").iterdir() for text in disk_tables.read_records(path).values()
    ]
    for name, entry in catalog.snapshot.entries.items():
        records = [record for record in found if record is not None and record.entry.name == name]
        newest = max(records, key=lambda record: record.position.generation)
        assert newest.entry == entry
        assert newest.aliases == catalog.snapshot.aliases_of(name)


@pytest.mark.parametrize(("target", "later"), [("acme/x", "y"), ("y", "acme/x")])
def test_alias_that_was_being_moved_is_there_after_a_rebuild(
    filled: AdapterConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, later: str
) -> None:
    """Killed after the first of its records is in place; then an older catalog is put back."""
    older = tmp_path / "older"
    shutil.copyfile(filled.store / CATALOG, older)

    def flush(path: Path) -> None:
        if path.parent.name == "blobs":
            raise KeyboardInterrupt

    with open_registry(registries.at(filled.store), is_source=False) as place:
        place.catalog.set_alias("other", target)
        with monkeypatch.context() as patched:
            patched.setattr(disk_tables, "flush", flush)
            with pytest.raises(KeyboardInterrupt):
                place.catalog.set_alias("other", later)
    lose(filled.store)
    shutil.copyfile(older, filled.store / CATALOG)
    plan = rebuild_folder(filled.store, [], False, lambda done, total: None).plan
    assert plan.aliases.get("other") in (target, later)


def test_deleted_id_leaves_no_record_beside_what_others_name(filled: AdapterConfig) -> None:
    """`y` has the same content as the first version of `acme/x`."""
    with open_registry(registries.at(filled.store), is_source=False) as place:
        place.catalog.remove("acme/x")
        (digest,) = {version.digest for version in place.catalog.entry("y").versions}
    blob = registries.blob(filled.store, digest)
    assert list(disk_tables.read_records(blob)) == [key_of("y")]
    assert b"acme" not in b"".join(path.read_bytes() for path in blob.iterdir())


def test_broken_blob_that_is_replaced_keeps_the_records_of_all_who_name_it(filled: AdapterConfig) -> None:
    with open_registry(registries.at(filled.store), is_source=False) as place:
        (digest,) = {version.digest for version in place.catalog.entry("y").versions}
        registries.corrupt(filled.store, digest)
        registries.put(place, "acme/x", "one")
    assert set(disk_tables.read_records(registries.blob(filled.store, digest))) == {key_of("acme/x"), key_of("y")}


def test_record_for_which_there_is_no_room_refuses_the_change_and_a_deletion_goes_through(
    filled: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_registry(registries.at(filled.store), is_source=False) as place:
        before = place.catalog.snapshot
        with monkeypatch.context() as patched:
            patched.setattr(disk_tables, "flush", full)
            with pytest.raises(AdapterUnavailableError, match="No space left"):
                place.catalog.set_pinned("y", True)
            assert place.catalog.snapshot is before
            place.catalog.remove("acme/x", 4)
            writer = place.catalog.ledger.observer
            assert writer.has_pending  # type: ignore[attr-defined]
        writer.retry_pending(place.catalog.ledger)  # type: ignore[attr-defined]
        assert not writer.has_pending  # type: ignore[attr-defined]
        assert_newest_records_say_what_the_catalog_does(place.catalog, filled.store)


@pytest.mark.parametrize("part", ["staging", "remove_record"])
def test_record_that_is_tried_again_is_not_older_than_a_commit_that_comes_meanwhile(
    filled: AdapterConfig, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The id changes while its record is written again; it comes back while its record is removed again."""
    with open_registry(registries.at(filled.store), is_source=False) as place:
        catalog, store = place.catalog, place.store
        known = catalog.entry("initech/z").default
        acts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "staging": (lambda: catalog.set_pinned("initech/z", True), lambda: catalog.set_pinned("initech/z", False)),
            "remove_record": (
                lambda: catalog.remove("initech/z"),
                lambda: Registration(id="initech/z").commit(catalog.ledger, known),
            ),
        }
        first, second = acts[part]
        thread, sound = threading.Thread(target=second), getattr(store, part)

        def meanwhile(*arguments: object) -> object:
            monkeypatch.setattr(store, part, sound)
            thread.start()
            thread.join(0.3)
            return sound(*arguments)

        monkeypatch.setattr(store, part, _broken if part == "remove_record" else _staging_that_breaks)
        first()
        monkeypatch.setattr(store, part, meanwhile)
        writer = catalog.ledger.observer
        assert writer.has_pending  # type: ignore[attr-defined]
        writer.retry_pending(catalog.ledger)  # type: ignore[attr-defined]
        thread.join()
        assert_newest_records_say_what_the_catalog_does(catalog, filled.store)


def _broken(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


@contextmanager
def _staging_that_breaks(records: object) -> Iterator[Callable[[], None]]:
    yield _broken


def test_start_takes_records_of_deleted_ids_and_of_other_catalogs_away_and_leaves_newer_ones(
    filled: AdapterConfig,
) -> None:
    with open_registry(registries.at(filled.store), is_source=False) as place:
        state, entry = place.catalog.ledger.state, place.catalog.entry("initech/z")
        epoch, now = state.position.epoch, state.position.generation
        positions = {
            "initech/gone": Position(epoch, now),
            "initech/ahead": Position(epoch, now + 1),
            "initech/elsewhere": Position("another", now + 1),
        }
        digest = entry.default.digest
        texts = {
            key_of(name): text_of(BlobRecord(replace(entry, name=name), {}, position, 0.0))
            for name, position in positions.items()
        }
        with place.store.staging({digest: texts}) as publish:
            publish()
        assert sync_records(place.store, state) == 0
        left = place.store.records([digest])[digest]
    assert left.keys() == {key_of("initech/z"), key_of("initech/ahead")}


def test_start_writes_the_records_of_a_store_that_has_none(filled: AdapterConfig, spec: ModelSpec) -> None:
    for path in filled.store.glob("blobs/*/named-*"):
        path.unlink()
    with open_storage(filled) as storage:
        VerifyingRegistry(filled, spec, storage.catalog, storage.store, FakeVerifier()).sweep()
        assert_newest_records_say_what_the_catalog_does(storage.catalog, filled.store)
