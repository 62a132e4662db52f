from __future__ import annotations

import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.adapters.catalog import Catalog
from lora_serve.adapters.catalog_entry import VersionEntry
from lora_serve.core.errors import AdapterNotFoundError, ConfigError, ConflictError, InvalidRequestError


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def version(letter: str) -> VersionEntry:
    return VersionEntry(0, digest(letter), 8, 1000, {"r": 8, "targets": ["q_proj"]}, "folder x", 1.5)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path / "store")
    yield catalog
    catalog.close()


def reopened(catalog: Catalog, tmp_path: Path) -> Catalog:
    catalog.close()
    return Catalog(tmp_path / "store")


def test_new_content_is_a_new_version_and_becomes_what_the_id_means(catalog: Catalog) -> None:
    first, first_is_new = catalog.add("acme/support", version("a"))
    second, second_is_new = catalog.add("acme/support", version("b"))
    assert (first_is_new, second_is_new) == (True, True)
    assert [v.version for v in second.versions] == [1, 2]
    assert first.ref().label == "acme/support@1"
    assert catalog.resolve("acme/support").digest == digest("b")
    assert catalog.resolve("acme/support@1").digest == digest("a")
    assert catalog.resolve(f"acme/support@{digest('a')}").version == 1


def test_same_content_under_the_same_id_is_the_same_version(catalog: Catalog) -> None:
    catalog.add("a", version("a"))
    catalog.add("a", version("b"))
    entry, is_new = catalog.add("a", version("a"))
    assert not is_new
    assert [v.version for v in entry.versions] == [1, 2]
    assert catalog.resolve("a").version == 1  # what was sent last is what the id means


@pytest.mark.parametrize(
    "name",
    ["b", "a@2", "a@0", "a@01", "a@-1", "a@", "a@latest", "a@sha256:00", "a@1@1", "", "@1", "A", "a@" + "9" * 30],
)
def test_unknown_names_are_told_back_as_given(catalog: Catalog, name: str) -> None:
    catalog.add("a", version("a"))
    with pytest.raises(AdapterNotFoundError) as caught:
        catalog.resolve(name)
    assert caught.value.name == name


def test_owner_is_given_or_the_first_part_of_the_id_or_default(catalog: Catalog) -> None:
    catalog.add("acme/support", version("a"))
    catalog.add("plain", version("a"))
    catalog.add("x/y", version("a"), tenant="globex")
    assert [entry.tenant for entry in catalog.entries()] == ["acme", "default", "globex"]


def test_another_tenants_adapter_does_not_exist(catalog: Catalog) -> None:
    catalog.add("acme/support", version("a"))
    assert catalog.resolve("acme/support", tenant="acme").tenant == "acme"
    foreign, unknown = [], []
    for name, errors in (("acme/support", foreign), ("acme/nothing", unknown)):
        with pytest.raises(AdapterNotFoundError) as caught:
            catalog.resolve(name, tenant="globex")
        errors.append(str(caught.value).replace(name, "X"))
    assert foreign == unknown


def test_an_id_cannot_change_hands(catalog: Catalog) -> None:
    catalog.add("acme/support", version("a"))
    with pytest.raises(ConflictError):
        catalog.add("acme/support", version("b"), tenant="globex")
    assert catalog.resolve("acme/support").digest == digest("a")


@pytest.mark.parametrize("name", ["", "../x", "a@1", "a:b", "a b", "a//b", "a/", "x" * 129])
def test_illegal_ids_are_refused(catalog: Catalog, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        catalog.add(name, version("a"))


@pytest.mark.parametrize("metadata", [{"a": float("nan")}, {"a": object()}, {"a": "x" * 70000}])
def test_metadata_that_cannot_be_kept_is_refused(catalog: Catalog, metadata: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="metadata"):
        catalog.add("a", version("a"), metadata=metadata)


def test_tenant_that_is_no_name_is_refused(catalog: Catalog) -> None:
    with pytest.raises(InvalidRequestError, match="tenant"):
        catalog.add("a", version("a"), tenant="../x")


def test_pin_and_metadata_stay_when_a_new_version_says_nothing(catalog: Catalog) -> None:
    catalog.add("a", version("a"), pinned=True, metadata={"team": "x"})
    entry, _ = catalog.add("a", version("b"))
    assert (entry.pinned, entry.metadata) == (True, {"team": "x"})
    assert not catalog.set_pinned("a", False).pinned
    assert catalog.add("a", version("c"), metadata={})[0].metadata == {}


def test_removing_the_default_version_falls_back_to_the_newest_left(catalog: Catalog) -> None:
    for letter in "abc":
        catalog.add("a", version(letter))
    assert catalog.remove("a", 3) == (digest("c"),)
    assert catalog.resolve("a").version == 2
    assert catalog.remove("a", 1) == (digest("a"),)
    assert catalog.resolve("a").version == 2
    assert catalog.remove("a", 2) == (digest("b"),)
    with pytest.raises(AdapterNotFoundError):
        catalog.resolve("a")


def test_version_numbers_are_not_given_twice(catalog: Catalog) -> None:
    catalog.add("a", version("a"))
    catalog.add("a", version("b"))
    catalog.remove("a", 2)
    assert catalog.add("a", version("c"))[0].default_version == 3


def test_removing_tells_only_digests_that_no_other_id_names(catalog: Catalog) -> None:
    catalog.add("a", version("a"))
    catalog.add("a", version("b"))
    catalog.add("b", version("a"))
    assert catalog.remove("a") == (digest("b"),)
    assert catalog.remove("b") == (digest("a"),)


@pytest.mark.parametrize(("name", "number"), [("b", None), ("a", 2)])
def test_removing_what_is_not_there_changes_nothing(catalog: Catalog, name: str, number: int | None) -> None:
    catalog.add("a", version("a"))
    with pytest.raises(AdapterNotFoundError):
        catalog.remove(name, number)
    assert catalog.resolve("a").version == 1


def test_lists_by_name_in_pages(catalog: Catalog) -> None:
    for number in range(7):
        catalog.add(f"acme/{number}", version("a"))
        catalog.add(f"globex/{number}", version("a"))
    first = catalog.entries(tenant="acme", limit=4)
    rest = catalog.entries(tenant="acme", after=first[-1].name, limit=4)
    assert [entry.name for entry in (*first, *rest)] == [f"acme/{number}" for number in range(7)]
    assert catalog.entries(after="zzz") == ()
    assert len(catalog.entries()) == 14


def test_everything_is_there_again_after_a_restart(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add("a", version("a"), pinned=True, metadata={"x": [1, "é"]})
    catalog.add("a", version("b"))
    catalog.add("c", version("a"), tenant="t")
    catalog.remove("a", 2)
    before = catalog.snapshot
    catalog = reopened(catalog, tmp_path)
    assert catalog.snapshot == before
    assert catalog.strays() == {digest("b")}
    assert catalog.add("a", version("d"))[0].default_version == 3
    catalog.close()


def test_strays_are_remembered_until_named_or_forgotten(catalog: Catalog) -> None:
    for letter in "aab":
        catalog.note_stray(digest(letter))
    catalog.add("a", version("a"))
    assert catalog.strays() == {digest("b")}
    catalog.forget_stray(digest("b"))
    assert catalog.strays() == set()


def test_readers_on_other_threads_always_see_whole_states(catalog: Catalog) -> None:
    torn: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            snapshot = catalog.snapshot
            named = {version.digest for entry in snapshot.entries.values() for version in entry.versions}
            if snapshot.digests != named or snapshot.names != tuple(sorted(snapshot.entries)):
                torn.append(snapshot)
            torn.extend(entry for entry in catalog.entries() if entry.default not in entry.versions)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        catalog.add(f"a{number % 3}", version("a"))
        newest = catalog.add(f"a{number % 3}", version("b"))[0].default_version
        catalog.remove(f"a{number % 3}", newest if number % 2 else None)
    done.set()
    reader.join()
    assert torn == []


def test_store_is_for_its_owner_only(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add("a", version("a"))
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_commits_are_flushed_to_disk(catalog: Catalog, tmp_path: Path) -> None:
    db = catalog._db._db
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert db.execute("PRAGMA foreign_keys").fetchone() == (1,)


def test_second_server_on_one_store_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another server"):
        Catalog(tmp_path / "store")
    catalog = reopened(catalog, tmp_path)
    catalog.close()


def test_damaged_catalog_is_told_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite3").write_bytes(b"not a database" * 100)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--store .*not a database"):
            Catalog(tmp_path)
    assert (tmp_path / "catalog.sqlite3").read_bytes().startswith(b"not a database")


def test_catalog_of_a_newer_release_is_not_touched(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "catalog.sqlite3")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="newer"):
        Catalog(tmp_path)


def test_store_that_is_a_file_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(ConfigError, match="--store"):
        Catalog(tmp_path / "store")
