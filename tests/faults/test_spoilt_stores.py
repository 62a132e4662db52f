"""Stores in which something else lies where a file or folder of ours should be, or a file is damaged: a start ends with
words that name it, or it heals where nothing can be lost.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.core.errors import ConfigError, DamagedFileError
from tests.canary.asking import Canaries
from tests.canary.house import House, running, settings_of
from tests.canary.questions import World
from tests.canary.watch import watching
from tests.redis_server import RedisServer
from tests.tiers import mostly_nightly

DATABASES = ("catalog.sqlite3", "tenants.sqlite3", "usage.sqlite3", "audit.sqlite3")
MIRRORS = ("mirror.sqlite3", "tenants-mirror.sqlite3")
FOLDERS = ("blobs", "tmp")


@pytest.fixture(scope="module")
def sound(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The store of a server that was stopped, and its tenants' keys."""
    store = tmp_path_factory.mktemp("sound") / "store"
    with running(settings_of(world, store, admin_key=None, auth="off")):
        pass
    with running(settings_of(world, store)) as house:
        return store, dict(house.keys)


@pytest.fixture
def store(sound: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound[0], tmp_path / "store"))


def in_place_of(path: Path, make: Callable[[Path], object]) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def to_nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere" / "at-all")


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 3000)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 8192 * 4096)


def overwritten(path: Path) -> None:
    """The header is as it was, every page after the first is noise."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))


def page_zeroed(number: int) -> Callable[[Path], object]:
    def zero(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(4096 * (number - 1))
            file.write(bytes(4096))

    return zero


STRANGERS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir, "link_to_nowhere": to_nowhere, "pipe": os.mkfifo,
    "link_to_a_device": lambda path: path.symlink_to("/dev/zero"),
}  # fmt: skip
FILES = (*DATABASES, "replica", "admin_key", "lock")
NO_FOLDERS: dict[str, Callable[[Path], object]] = {
    "file": Path.touch, "link_to_nowhere": to_nowhere, "pipe": os.mkfifo,
}  # fmt: skip
DAMAGES: dict[str, Callable[[Path], object]] = {"garbage": garbage, "cut": cut, "overwritten": overwritten}
ZEROED: dict[str, Callable[[Path], object]] = {"page_2": page_zeroed(2), "page_3": page_zeroed(3)}


def assert_says(world: World, store: Path, name: str) -> ConfigError:
    """A server does not start there, and says why."""
    house = House(settings_of(world, store, admin_key=None, auth="off", lora_modules=()))
    with pytest.raises(ConfigError, match=name) as caught:
        house.start()
    house.stop()
    assert "--" in str(caught.value)
    assert str(store) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("how", STRANGERS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_named(world: World, store: Path, name: str, how: str) -> None:
    in_place_of(store / name, STRANGERS[how])
    if name in ("lock", "replica", "admin_key") and how == "link_to_nowhere":
        assert_says(world, store, "store")
    else:
        assert_says(world, store, name if name != "lock" else "store")


@pytest.mark.parametrize("how", NO_FOLDERS)
@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_no_folder_is_named(world: World, store: Path, name: str, how: str) -> None:
    in_place_of(store / name, NO_FOLDERS[how])
    assert_says(world, store, name)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", DATABASES)
def test_damaged_database_is_named(world: World, store: Path, name: str, how: str) -> None:
    DAMAGES[how](store / name)
    if name == "catalog.sqlite3":
        assert_says(world, store, "adapter catalog .* registry rebuild")
    else:
        said = assert_says(world, store, name)
        assert isinstance(said, DamagedFileError)
        assert "backup" in str(said)


@pytest.mark.parametrize("how", ZEROED)
@pytest.mark.parametrize("name", DATABASES[1:])
def test_database_of_which_one_page_is_lost_is_named(world: World, store: Path, name: str, how: str) -> None:
    ZEROED[how](store / name)
    assert isinstance(assert_says(world, store, f"{name}.*backup"), DamagedFileError)


def test_database_without_its_tables_is_named(world: World, store: Path) -> None:
    for name, table in zip(DATABASES, ("position", "records", "last_batch", "audit"), strict=True):
        shutil.copy(store / name, store / "kept")
        with closing(sqlite3.connect(store / name)) as database:
            database.execute(f"DROP TABLE {table}")
        assert_says(world, store, "adapter catalog" if name == "catalog.sqlite3" else name)
        shutil.move(store / "kept", store / name)


def test_quarantine_and_hot_adapters_that_are_something_else_stop_no_start(
    world: World, canaries: Canaries, store: Path, sound: tuple[Path, dict[str, str]]
) -> None:
    (store / "quarantine").touch()
    in_place_of(store / "hot.json", os.mkfifo)
    broken = next(path for path in (store / "blobs").iterdir() if (path / "adapter_config.json").exists())
    (broken / "adapter_config.json").write_text("{")
    with running(settings_of(world, store, warmup="auto"), sound[1]) as house, watching(house, canaries):
        pass


@pytest.mark.parametrize("how", mostly_nightly(DAMAGES, "garbage"))
def test_damaged_mirrors_are_made_anew_of_what_redis_has(
    world: World, canaries: Canaries, tmp_path: Path, own_redis: RedisServer, how: str
) -> None:
    settings = settings_of(world, tmp_path / "store", redis_url=own_redis.url, max_loras=16)
    with running(settings) as house:
        keys = house.keys
    for name in MIRRORS:
        DAMAGES[how](settings.store / name)
    again = settings_of(world, settings.store, redis_url=own_redis.url, max_loras=16, lora_modules=())
    with running(again, keys) as house, watching(house, canaries):
        assert [line for line in house.log if "mirror.sqlite3" in line and "set aside" in line]
    assert (settings.store / "mirror.sqlite3.damaged").exists()
    if how != "garbage":  # once is enough
        return
    own_redis.kill()
    with running(again, keys) as house, watching(house, canaries):
        pass


@pytest.mark.parametrize("name", MIRRORS)
@pytest.mark.parametrize("how", STRANGERS)
def test_mirror_that_is_no_file_is_named(world: World, tmp_path: Path, redis_url: str, name: str, how: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    STRANGERS[how](store / name)
    house = House(settings_of(world, store, redis_url=redis_url, lora_modules=()))
    with pytest.raises(ConfigError, match=name):
        house.start()
    house.stop()


def test_cache_that_is_no_folder_is_named(world: World, tmp_path: Path, redis_url: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "cache").touch()
    house = House(settings_of(world, store, redis_url=redis_url, lora_modules=()))
    with pytest.raises(ConfigError, match="cache"):
        house.start()
    house.stop()
