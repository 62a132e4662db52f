"""Disks that are full, read-only or broken: writes are refused in words, what is served goes on, and it heals."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lora_serve.adapters.registration import registry as registry_module
from lora_serve.adapters.stores import disk, files
from tests.canary.asking import Canaries
from tests.canary.house import ADMIN, House, running, settings_of
from tests.canary.questions import World
from tests.canary.watch import watching
from tests.faults.injecting import ask, make_cold, register_victim, settle
from tests.hostile.adapter_files import files_of, tar
from tests.hostile.sending import Reply, as_admin, call
from tests.oracle import save_adapter

pytestmark = pytest.mark.engines("thread", nightly=["process"])
BUSY = (503, 413)


@pytest.fixture(scope="module")
def folder(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)


@pytest.fixture(scope="module", autouse=True)
def truth(house: House, folder: Path) -> str:
    register_victim(house, folder)
    return str(ask(house).json["choices"][0]["text"])


@pytest.fixture(scope="module")
def other(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "other", seed=78, std=0.2, r=4)


def upload(house: House, folder: Path, name: str = "new/x") -> Reply:
    return call(house, "PUT", f"/admin/adapters/{name}", tar(files_of(folder)), dict(ADMIN))


def journal_of(house: House) -> Any:
    return house.services.catalog.ledger.journal


def failing(number: int) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


SEAMS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "full_at_the_folder": (registry_module, "new_folder", failing(errno.ENOSPC)),
    "read_only_at_the_folder": (registry_module, "new_folder", failing(errno.EROFS)),
    "quota_at_the_copy": (disk, "link_or_copy", failing(errno.EDQUOT)),
    "full_at_the_copy": (disk, "link_or_copy", failing(errno.ENOSPC)),
    "error_at_the_flush": (disk, "flush", failing(errno.EIO)),
    "too_many_open_files": (disk, "scratch_folder", failing(errno.EMFILE)),
    "error_at_the_size": (disk, "content_bytes", failing(errno.EIO)),
    "stale_handle": (files, "make_private", failing(errno.ESTALE)),
}


@pytest.mark.many(4)
@pytest.mark.parametrize("name", SEAMS)
def test_store_that_cannot_be_written_refuses_and_leaves_nothing(
    house: House, canaries: Canaries, other: Path, name: str
) -> None:
    module, attribute, broken = SEAMS[name]
    with watching(house, canaries):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, attribute, broken)
            reply = upload(house, other)
        assert (reply.status, "Retry-After" in reply.headers) == (503, True)
        assert "new/x" not in house.services.catalog.snapshot.entries
        settle(lambda: upload(house, other).status == 201)  # it heals by itself
        assert as_admin(house, "DELETE", "/admin/adapters/new/x").status == 200


def test_disk_that_fills_up_at_any_write_of_an_upload_leaves_nothing(
    house: House, canaries: Canaries, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th flush fails, for every n that a registration has."""
    sound, calls = disk.flush, [0, 0]

    def flush(path: Path) -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        sound(path)

    with watching(house, canaries):
        monkeypatch.setattr(disk, "flush", flush)
        monkeypatch.setattr(files, "flush", flush)
        failing_call = 0
        while "new/x" not in house.services.catalog.snapshot.entries:
            failing_call += 1
            settle(lambda: _uploaded_or_failed(house, other, calls, failing_call))  # noqa: B023
        assert failing_call > 2
        assert as_admin(house, "DELETE", "/admin/adapters/new/x").status == 200


def _uploaded_or_failed(house: House, folder: Path, calls: list[int], failing_call: int) -> bool:
    """Whether the upload got as far as the call that is to fail; until bytes of the last try are gone it does not."""
    calls[:] = [0, failing_call]
    status = upload(house, folder).status
    assert status in (201, 503)
    return status == 201 or calls[0] >= failing_call


@pytest.mark.parametrize(
    "error", [sqlite3.OperationalError("database is locked"), sqlite3.OperationalError("disk I/O")]
)
def test_catalog_that_cannot_be_written_refuses(
    house: House, canaries: Canaries, other: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_of(house)
    sound = journal._db

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name in ("execute", "executemany", "executescript"):
                return self._refuse
            return getattr(sound, name)

        def __enter__(self) -> Any:
            return sound.__enter__()

        def __exit__(self, *details: Any) -> Any:
            return sound.__exit__(*details)

        def _refuse(self, *_: object) -> Any:
            raise error

    with watching(house, canaries):
        monkeypatch.setattr(journal, "_db", Broken())
        assert upload(house, other).status == 503
        monkeypatch.setattr(journal, "_db", sound)
        assert "new/x" not in house.services.catalog.snapshot.entries
        settle(lambda: upload(house, other).status == 201)
        assert as_admin(house, "DELETE", "/admin/adapters/new/x").status == 200


def test_prepared_file_that_cannot_be_kept_stops_nobody(
    house: House, canaries: Canaries, truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.DiskStore, "keep_beside", failing(errno.ENOSPC))
    make_cold(house)
    with watching(house, canaries):
        assert ask(house).json["choices"][0]["text"] == truth


def test_act_that_cannot_be_noted_is_refused_and_noted_again_once_there_is_room(
    house: House, canaries: Canaries, other: Path
) -> None:
    database = house.services.audit._journal._database
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["could not be noted"]
        database.execute("PRAGMA query_only = 1")
        try:
            reply = upload(house, other)
            assert (reply.status, "Retry-After" in reply.headers) == (503, True)
        finally:
            database.execute("PRAGMA query_only = 0")
        assert upload(house, other).status in (200, 201)
        assert as_admin(house, "DELETE", "/admin/adapters/new/x").status == 200
    assert not list(house.services.audit._journal.broken())


def test_usage_that_cannot_be_written_delays_no_answer_and_is_written_later(house: House, canaries: Canaries) -> None:
    journal, meter = house.services.meter._journal, house.services.meter
    assert journal is not None
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["usage is counted in memory only"]
        journal._database.execute("PRAGMA query_only = 1")
        try:
            assert ask(house).status == 200
            house.on_loop(meter.flush())
            assert meter._is_failing
        finally:
            journal._database.execute("PRAGMA query_only = 0")
    house.on_loop(meter.flush())
    assert not meter._is_failing
    assert not meter._writing


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of 2 MiB where this process may mount one; else an ordinary folder."""
    place.mkdir()
    is_mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], check=False).returncode == 0
    try:
        yield place
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def filled(place: Path) -> Iterator[None]:
    """Not a byte is free on the small disk; on an ordinary one writing fails as if."""
    filler = place / "filler"
    if not os.path.ismount(place):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "link_or_copy", failing(errno.ENOSPC))
            yield
        return
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(place).f_bavail == 0
    try:
        yield
    finally:
        filler.unlink()


def test_full_disk_serves_what_it_has_and_takes_new_adapters_again_once_there_is_room(
    world: World, canaries: Canaries, other: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small") as place, running(settings_of(world, place / "store")) as house:
        with watching(house, canaries) as watch, filled(place):
            watch.expected_in_log = ["could not be noted", "usage is counted"]  # they lie on the same disk
            for number in range(3):
                assert upload(house, other, f"new/{number}").status in BUSY
            body = {"id": "new/by-path", "source": str(other)}
            assert as_admin(house, "POST", "/admin/adapters", body).status in BUSY
        assert upload(house, other).status == 201
        with watching(house, canaries):
            assert ask(house, "new/x").status == 200


def test_store_that_becomes_read_only_serves_what_it_has(house: House, canaries: Canaries, other: Path) -> None:
    """No folder can be made in it, and the catalog's file takes no change."""
    db = journal_of(house)._db
    with watching(house, canaries):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry_module, "new_folder", failing(errno.EROFS))
            db.execute("PRAGMA query_only = 1")
            try:
                assert upload(house, other).status == 503
                assert as_admin(house, "DELETE", "/admin/adapters/acme/a").status == 503
            finally:
                db.execute("PRAGMA query_only = 0")
        settle(lambda: upload(house, other).status == 201)
        assert as_admin(house, "DELETE", "/admin/adapters/new/x").status == 200


def test_leftovers_and_strangers_in_the_store_stop_no_start(world: World, canaries: Canaries, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running(settings_of(world, store)):
        pass
    blobs = store / "blobs"
    (blobs / "not-a-digest").mkdir()
    (blobs / ("0" * 64)).mkdir()
    (blobs / ("1" * 64)).write_text("a file where a folder should be")
    (blobs / ("2" * 64)).symlink_to("/etc")
    (blobs / ("3" * 64)).mkdir()
    (blobs / ("3" * 64) / "adapter_config.json").symlink_to("/etc/passwd")
    (store / "tmp" / "left").mkdir()
    (store / "tmp" / "link").symlink_to("/etc")
    (store / "quarantine").mkdir(exist_ok=True)
    one = next(path for path in sorted(blobs.iterdir()) if (path / "adapter_model.safetensors").exists())
    (one / "surprise").write_text("x")
    with running(settings_of(world, store)) as house, watching(house, canaries):
        pass
    assert Path("/etc/passwd").exists()
    assert list((store / "tmp").iterdir()) == []
    assert not (blobs / ("0" * 64)).exists()


@pytest.mark.many(1)
@pytest.mark.parametrize("content", [b"", b"garbage" * 1000, None], ids=["empty", "garbage", "folder"])
def test_note_of_hot_adapters_that_is_none_stops_no_start(
    world: World, canaries: Canaries, tmp_path: Path, content: bytes | None
) -> None:
    store = tmp_path / "store"
    with running(settings_of(world, store, warmup="auto")):
        pass
    for note in store.glob("*.json"):
        note.unlink()
        if content is None:
            note.mkdir()
        else:
            note.write_bytes(content)
    with running(settings_of(world, store, warmup="auto")) as house, watching(house, canaries):
        pass
    shutil.rmtree(store)
