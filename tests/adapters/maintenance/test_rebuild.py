"""`registry rebuild` and `registry accept`: a catalog is made again from the blobs; nothing is deleted on the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from lora_serve.adapters.catalog.blob_leases import CatalogHistory
from lora_serve.adapters.catalog.blob_records import BlobRecord
from lora_serve.adapters.catalog.edits import new_entry
from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.opening import merge_branches
from lora_serve.adapters.catalog.state import CatalogState, Lineage, lineage_change
from lora_serve.adapters.checkpoint.content import file_sha256
from lora_serve.adapters.maintenance import rebuild as rebuilding
from lora_serve.adapters.maintenance.copying import BlobCopier
from lora_serve.adapters.maintenance.rebuild import RebuildReport, accept_folder, rebuild_folder, rebuild_redis
from lora_serve.adapters.maintenance.rebuild_plan import RebuildOutcome
from lora_serve.adapters.maintenance.registries import NotCopyableError, bad_blobs, open_registry
from lora_serve.adapters.storage import open_storage
from lora_serve.adapters.stores.disk import DiskStore, is_sound
from lora_serve.cli import main
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import ConfigError
from tests import registries
from tests.adapters.catalog.test_lost_catalog import be_no_database, cut, empty, lose, zero_a_page
from tests.catalog_versions import version

CATALOG = "catalog.sqlite3"
Ids = dict[str, CatalogEntry]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    registries.fill(tmp_path / "store")
    return tmp_path / "store"


def rebuild(store: Path, *also: Path, is_dry: bool = False) -> RebuildReport:
    return rebuild_folder(store, also, is_dry, lambda done, total: None)


def rebuild_in(url: str, *also: Path) -> RebuildReport:
    return rebuild_redis(registries.at(url), also, False, lambda done, total: None)


def starts(store: Path) -> bool:
    config = AdapterConfig(store=store, max_loras=4, max_lora_rank=64, adapter_host_memory=10**8, max_upload_size=10**7)
    try:
        with open_storage(config):
            return True
    except ConfigError:
        return False


@pytest.mark.parametrize("damage", [lose, empty, cut, zero_a_page, be_no_database])
def test_all_comes_back_as_it_was(store: Path, damage: Callable[[Path], None]) -> None:
    before = registries.content(store)
    damage(store)
    assert not starts(store)
    rebuilt = rebuild(store)
    assert rebuilt.is_whole
    assert {one.outcome for one in rebuilt.plan.ids} == {RebuildOutcome.RESTORED}
    assert starts(store)
    assert registries.content(store) == before
    assert rebuild(store).was == "good"


@pytest.mark.parametrize("damage", [be_no_database, cut])
def test_damaged_catalog_is_kept(store: Path, damage: Callable[[Path], None]) -> None:
    damage(store)
    was = (store / CATALOG).read_bytes()
    rebuilt = rebuild(store)
    assert rebuilt.was == "damaged"
    assert (store / rebuilt.kept).read_bytes() == was


def test_older_catalog_wins_but_for_what_came_after_it_and_what_it_let_go_stays_away(store: Path) -> None:
    with open_registry(registries.at(store), is_source=False) as place:
        place.catalog.remove("initech/z")  # killed before its blob was freed
    shutil.copyfile(store / CATALOG, store / "older")
    with open_registry(registries.at(store), is_source=False) as place:
        registries.put(place, "acme/x", "six")
        registries.put(place, "new/one", "seven")
        place.catalog.set_alias("young", "new/one")
        entries, aliases = registries.content_of(place.catalog)
    os.replace(store / "older", store / CATALOG)
    assert not starts(store)
    rebuilt = rebuild(store)
    assert {one.name: one.outcome for one in rebuilt.plan.ids} == {
        "acme/x": RebuildOutcome.CHANGED,
        "new/one": RebuildOutcome.RESTORED,
        "y": RebuildOutcome.UNCHANGED,
    }
    assert starts(store)
    assert registries.content(store) == (entries, aliases)
    assert not (store / "unnamed").exists()


def test_deletions_that_were_acknowledged_stay_deleted_though_the_catalog_is_lost(store: Path) -> None:
    with open_registry(registries.at(store), is_source=False) as place:
        place.catalog.remove("initech/z")
        place.catalog.remove("acme/x", 4)
        entries = dict(place.catalog.snapshot.entries)
    lose(store)
    rebuilt = rebuild(store)
    assert rebuilt.plan.entries == entries
    assert not rebuilt.aside
    assert registries.content(store)[0] == entries


def test_accepted_loss_is_undone_by_a_later_rebuild(store: Path) -> None:
    entries, aliases = registries.content(store)
    lose(store)
    assert accept_folder(store) == 4
    assert starts(store)
    with open_registry(registries.at(store), is_source=False) as place:
        registries.put(place, "initech/z", "another one now")
        ours = place.catalog.entry("initech/z")
    rebuilt = rebuild(store)
    assert {one.name: one.outcome for one in rebuilt.plan.ids} == {
        "acme/x": RebuildOutcome.RESTORED,
        "initech/z": RebuildOutcome.UNCHANGED,
        "y": RebuildOutcome.RESTORED,
    }
    assert registries.content(store) == ({**entries, "initech/z": ours}, aliases)
    assert len(list(DiskStore(store).orphans.all())) == 1  # what `initech/z` was before


def test_accepted_older_catalog_goes_on_without_what_came_after_it(store: Path) -> None:
    shutil.copyfile(store / CATALOG, store / "older")
    before = registries.content(store)
    with open_registry(registries.at(store), is_source=False) as place:
        registries.put(place, "new/one", "seven")
    os.replace(store / "older", store / CATALOG)
    assert accept_folder(store) == 1
    assert starts(store)
    assert registries.content(store) == before
    assert rebuild(store).plan.entries.keys() == {*before[0], "new/one"}


def test_broken_and_missing_blobs_are_left_out_and_named(store: Path) -> None:
    with open_registry(registries.at(store), is_source=False) as place:
        versions = {v.version: v.digest for v in place.catalog.entry("acme/x").versions}
        alone = place.catalog.entry("initech/z").default.digest
    lose(store)
    registries.corrupt(store, versions[3])
    shutil.rmtree(registries.blob(store, alone))
    rebuilt = rebuild(store)
    found = {one.name: one for one in rebuilt.plan.ids}
    assert not rebuilt.is_whole
    assert found["acme/x"].missing == (f"3 ({versions[3]})",)
    assert [v.version for v in found["acme/x"].entry.versions] == [1, 4]  # type: ignore[union-attr]
    assert "initech/z" not in found  # its record went with its blob
    assert rebuilt.plan.aliases == {"live": "acme/x", "first": "acme/x@1"}
    assert starts(store)
    assert (
        len(os.listdir(store / "quarantine") if (store / "quarantine").exists() else os.listdir(store / "unnamed")) == 1
    )


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "lora_serve_added_tokens.json"])
def test_file_of_holes_without_an_end_is_broken_and_not_read(
    store: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registries.fill(tmp_path / "other")
    (broken,) = [path.parent for path in (store / "blobs").glob("*/lora_serve_added_tokens.json")]
    os.truncate(broken / name, 2**42)

    def read(path: Path) -> bytes:
        assert path.stat().st_size < 2**20
        return file_sha256(path)

    monkeypatch.setattr("lora_serve.adapters.checkpoint.content.file_sha256", read)
    digest = f"sha256:{broken.name}"
    assert not is_sound(broken, digest)
    with open_registry(registries.at(store), is_source=True) as place:
        assert [bad.digest for bad in bad_blobs(place, lambda done, total: None)] == [digest]
        with open_registry(registries.at(tmp_path / "target"), is_source=False) as target:
            copier = BlobCopier(place.store, target.store, target.tmp, {}, lambda done, total: None)
            with pytest.raises(NotCopyableError, match=name):
                copier.copy(digest)
    (missing,) = [one.missing for one in rebuild(store, is_dry=True).plan.ids if one.missing]
    assert digest in missing[0]
    assert rebuild(store, tmp_path / "other").is_whole


def test_blobs_of_another_folder_are_taken_in(store: Path, tmp_path: Path) -> None:
    before = registries.content(store)
    for path in store.glob("blobs/*"):
        shutil.copytree(path, tmp_path / "replica" / "cache" / "blobs" / path.name)
    shutil.rmtree(store)
    store.mkdir()
    assert rebuild(store).plan.ids == ()
    assert rebuild(store, tmp_path / "replica").is_whole
    assert registries.content(store) == before


def test_copy_of_an_id_that_was_deleted_is_not_taken_in(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "replica")
    with open_registry(registries.at(store), is_source=False) as place:
        registries.remove(place, "initech/z")
    before = registries.content(store)
    assert rebuild(store, tmp_path / "replica").was == "good"
    assert registries.content(store) == before


def test_dry_run_writes_nothing(store: Path) -> None:
    lose(store)
    before = sorted(store.rglob("*"))
    assert rebuild(store, is_dry=True).plan.entries.keys() == {"acme/x", "initech/z", "y"}
    assert sorted(store.rglob("*")) == before


STEPS = ["DiskStore", "_bring_in", "_replace", "_tidy", "sync_records"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["older", "lost"])
def test_rebuild_that_breaks_off_is_completed_by_another(
    store: Path, step: str, is_after: bool, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(store / CATALOG, store / "older")
    with open_registry(registries.at(store), is_source=False) as place:
        registries.put(place, "acme/x", "six")
        place.catalog.remove("initech/z")
        registries.put(place, "new/one", "seven")
        before = registries.content_of(place.catalog)
    os.replace(store / "older", store / CATALOG)
    if is_lost:
        lose(store)
    real = getattr(rebuilding, step)

    def killed(*args: object) -> object:
        if is_after:
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rebuilding, step, killed)
        with pytest.raises(KeyboardInterrupt):
            rebuild(store)
    assert rebuild(store).is_whole
    assert starts(store)
    entries, aliases = registries.content(store)
    extra = set() if is_lost else {"initech/z"}  # the older catalog still had it
    assert {name: entries[name] for name in entries.keys() - extra} == before[0]
    assert aliases == before[1]


def test_registry_in_redis_that_was_emptied_comes_back_from_a_replicas_cache(redis_url: str, tmp_path: Path) -> None:
    registries.fill(redis_url)
    before = registries.content(redis_url)
    config = AdapterConfig(
        store=tmp_path / "replica",
        redis_url=redis_url,
        max_loras=4,
        max_lora_rank=64,
        adapter_host_memory=10**8,
        max_upload_size=10**7,
    )
    with open_storage(config) as storage:
        for digest in storage.catalog.snapshot.digests:
            with storage.store.open(digest):
                pass
    for path in (tmp_path / "replica").glob("mirror*"):
        path.unlink()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with pytest.raises(ConfigError, match="registry rebuild"), open_storage(config):
        pass
    assert rebuild_in(redis_url, tmp_path / "replica").is_whole
    assert registries.content(redis_url) == before
    with open_storage(config) as storage:
        assert storage.catalog.snapshot.entries == before[0]


@pytest.mark.parametrize(
    "keys", [("position",), ("records",), ("position", "records"), ("position", "records", "changes")]
)
def test_registry_keys_that_were_removed_from_redis_come_back_from_the_blobs(
    redis_url: str, keys: tuple[str, ...]
) -> None:
    registries.fill(redis_url)
    before = registries.content(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*(f"lora_serve:registry:{key}" for key in keys))
    rebuilt = rebuild_in(redis_url)
    assert rebuilt.is_whole
    assert registries.content(redis_url) == before


def test_command_says_what_was_and_what_is(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.parent)
    lose(store)
    assert main(["registry", "rebuild", "--store", "store", "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["catalog_was"], document["dry_run"], document["aside"]) == ("lost", True, [])
    assert [one["id"] for one in document["adapters"]] == ["acme/x", "initech/z", "y"]
    assert all(one["fate"] in ("restored", "changed", "unchanged", "lost") for one in document["adapters"])
    assert main(["registry", "rebuild", "--store", "store"]) == 0
    said = capsys.readouterr().out
    assert "the catalog was lost; adapters in store: 3 restored" in said
    assert main(["registry", "accept", "--store", "store"]) == 0
    assert "0 blobs" in capsys.readouterr().out
    assert main(["registry", "rebuild", "--store", "nowhere"]) == 2


def test_registry_that_was_made_again_has_the_only_word_over_an_older_state_of_it() -> None:
    """The copy that a replica has of the rebuilt one, and a Redis that was set back to before."""
    older, newer = {"alias:a": "acme/old"}, {"alias:a": "acme/new"} | lineage_change(Lineage(((1, 99),), ("e",)))
    contested = {key: (newer.get(key), {**older, **lineage_change(Lineage((), ("e",)))}.get(key)) for key in newer}
    assert merge_branches({}, contested)["alias:a"] == "acme/new"
    swapped = {key: (theirs, ours) for key, (ours, theirs) in contested.items()}
    assert merge_branches({}, swapped)["alias:a"] == "acme/new"


def test_record_of_a_later_epoch_of_the_same_registry_is_ahead_of_it() -> None:
    early = CatalogState(lineage=Lineage((), ("one",))).after(Page(Position("one", 5), {}))
    late = CatalogState(lineage=Lineage((), ("one", "two"))).after(Page(Position("two", 1), {}))
    stranger = CatalogState(lineage=Lineage((), ("other",))).after(Page(Position("other", 9), {}))
    entry = new_entry("a", "acme", version("a"), False, None)
    record = BlobRecord(entry, {}, Position("two", 1), 0.0, late.epochs)
    assert [CatalogHistory(state).is_ahead(record) for state in (early, late, stranger, CatalogState())] == [
        True, False, False, False,
    ]  # fmt: skip
