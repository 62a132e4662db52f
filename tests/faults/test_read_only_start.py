"""A server that starts on a disk which is full or read-only: it serves what is there, says so, and takes changes again
by itself once there is room.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_serve.adapters.stores import files
from lora_serve.app import warm_up
from tests.canary.asking import Canaries
from tests.canary.house import ADMIN, House, running, settings_of
from tests.canary.questions import BASE, World
from tests.canary.watch import watching
from tests.faults.injecting import ask, register_victim, settle
from tests.faults.small_disks import SmallDisk
from tests.hostile.adapter_files import files_of, tar
from tests.hostile.sending import Reply, as_admin, call, post
from tests.oracle import save_adapter

pytestmark = pytest.mark.engines("thread", nightly=["process"])


@dataclass(frozen=True)
class Crashed:
    """The store of a server that was killed, as it lay on its disk."""

    store: Path
    keys: dict[str, str]
    revoked: str  # a key's secret
    leaked: dict[str, str]  # a key that is to be revoked


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything looks again sooner than it would."""
    monkeypatch.setattr(files, "INTERVAL", 0.05)
    monkeypatch.setattr(files, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(files, "MAX_PAUSE", 1.0)
    monkeypatch.setattr(warm_up, "LOOK_SECONDS", 0.02)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "small")
    yield disk
    disk.close()


@pytest.fixture(scope="module")
def folder(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)


@pytest.fixture(scope="module")
def crashed(world: World, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Crashed:
    live, copy = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("crashed") / "store"
    with running(settings_of(world, live)) as house:
        register_victim(house, folder)
        revoked = as_admin(house, "POST", "/admin/tenants/acme/keys", {"label": "old"}).json
        as_admin(house, "DELETE", f"/admin/tenants/acme/keys/{revoked['id']}")
        leaked = as_admin(house, "POST", "/admin/tenants/acme/keys", {"label": "leaked"}).json
        shutil.copytree(live, copy)
        assert (copy / "catalog.sqlite3-wal").stat().st_size, "what it knew last is beside its files"
        return Crashed(copy, dict(house.keys), revoked["secret"], leaked)


def get(house: House, path: str) -> Reply:
    return call(house, "GET", path, b"", dict(ADMIN))


def is_writable(house: House) -> bool:
    (line,) = [
        line for line in get(house, "/metrics").body.splitlines() if line.startswith(b"lora_serve_store_writable ")
    ]
    return line.endswith(b" 1.0")


def upload(house: House, folder: Path, name: str = "new/x") -> Reply:
    return call(house, "PUT", f"/admin/adapters/{name}", tar(files_of(folder)), dict(ADMIN))


HOW = ["full", "read_only"]


def hindered(disk: SmallDisk, how: str) -> AbstractContextManager[None]:
    return disk.full() if how == "full" else disk.read_only()


@pytest.mark.crossed
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_server_starts_on_a_disk_that_cannot_be_written_and_takes_changes_once_it_can(
    world: World, canaries: Canaries, crashed: Crashed, disk: SmallDisk, folder: Path, how: str, end: str
) -> None:
    place = disk.place / "store"
    shutil.copytree(crashed.store, place)
    if end == "stopped":
        with running(settings_of(world, place), crashed.keys):
            pass
        assert not (place / "catalog.sqlite3-wal").exists()
    with ExitStack() as hindrance:
        hindrance.enter_context(hindered(disk, how))
        with running(settings_of(world, place), crashed.keys) as house:
            with watching(house, canaries) as watch:
                watch.expected_in_log = ["usage is counted in memory only", "could not be noted"]
                can_empty = how == "full" and disk.is_mounted
                assert_reads_only(house, folder, can_empty=can_empty)
                assert ask_with(house, crashed.revoked) == 401
            if can_empty:  # it opens its databases, in the room that the last server kept
                assert ask_with(house, crashed.leaked["secret"]) == 200
                reply = as_admin(house, "DELETE", f"/admin/tenants/acme/keys/{crashed.leaked['id']}")
                assert (reply.status, ask_with(house, crashed.leaked["secret"])) == (200, 401), reply.body
                reply = as_admin(house, "DELETE", "/admin/adapters/victim/x")
                assert (reply.status, ask(house).status) == (200, 404), reply.body
            hindrance.close()
            settle(lambda: is_writable(house))
            assert get(house, "/ready").json == {"status": "ready"}
            assert upload(house, folder).status == 201
            assert as_admin(house, "DELETE", "/admin/adapters/victim/x").status == (404 if can_empty else 200)
            assert not list(house.services.audit._journal.broken())
            said = [line for line in house.log if "stores.files" in line]
            assert ["cannot be written" in line for line in said] == [True, False], said
    with running(settings_of(world, place), crashed.keys) as house:
        assert ask(house, "new/x").status == 200
        assert ask(house).status == 404
        house.on_loop(house.services.meter.flush())
        assert usage_of(house) > 0, "what was counted while nothing could be written is not lost"


def test_first_start_on_a_full_disk_serves_the_base_model_and_makes_what_is_missing_later(
    world: World, disk: SmallDisk, folder: Path
) -> None:
    place = disk.place / "store"
    place.mkdir()
    settings = settings_of(world, place, admin_key=None, auth="off")
    with ExitStack() as hindrance:
        hindrance.enter_context(disk.full())
        with running(settings) as house:
            assert ask(house, BASE).status == 200
            assert ask(house, "acme/a").status == 404
            assert get(house, "/ready").json["read_only"]
            (told,) = [line for line in house.log if "admin key" in line]
            assert "once there is room; --admin-key names one meanwhile" in told
            hindrance.close()
            settle(lambda: is_writable(house))
            settle(lambda: ask(house, "acme/a").status == 200)  # --lora-modules
            admin = {"Authorization": f"Bearer {(place / 'admin_key').read_text().strip()}"}
            assert call(house, "PUT", "/admin/adapters/new/x", tar(files_of(folder)), admin).status == 201
    with running(settings) as house:
        assert ask(house, "new/x").status == 200


def test_running_server_whose_disk_gets_full_says_so_and_that_there_is_room_again(
    world: World, disk: SmallDisk
) -> None:
    with running(settings_of(world, disk.place / "store", lora_modules=())) as house:
        assert get(house, "/ready").json == {"status": "ready"}
        assert is_writable(house)
        if not disk.is_mounted:
            return
        with disk.full():
            settle(lambda: not is_writable(house))
            assert "No space left" in get(house, "/ready").json["reason"]
        settle(lambda: is_writable(house))


def assert_reads_only(house: House, folder: Path, *, can_empty: bool) -> None:
    """It says so, serves what it has and takes no change; `can_empty`: but what makes room, which is not tried here."""
    ready = get(house, "/ready")
    assert (ready.status, ready.json["status"], ready.json["read_only"]) == (200, "ready", True)
    assert "cannot be written" in ready.json["reason"]
    assert str(house.store) not in ready.json["reason"]
    assert not is_writable(house)
    assert ask(house).status == 200
    before = get(house, "/admin/engine").json["batcher"]["max_num_seqs"]
    for reply in (
        as_admin(house, "PUT", "/admin/engine", {"max_num_seqs": 3}),
        upload(house, folder),
        *(() if can_empty else (as_admin(house, "DELETE", "/admin/adapters/victim/x"),)),
        as_admin(house, "POST", "/admin/tenants", {"name": "newcomer"}),
    ):
        assert (reply.status, "Retry-After" in reply.headers) == (503, True)
        assert b"cannot be written" in reply.body
    assert get(house, "/admin/engine").json["batcher"]["max_num_seqs"] == before, (
        "an act that could not be noted is not done"
    )
    assert call(house, "DELETE", "/admin/adapters/victim/x").status == 401, "nor is a stranger told more than before"


def ask_with(house: House, secret: str) -> int:
    body = {"model": BASE, "prompt": "x", "max_tokens": 2}
    return post(house, "/v1/completions", body, {"Authorization": f"Bearer {secret}"}).status


def usage_of(house: House) -> int:
    rows, _ = house.on_loop(house.services.meter.rows(0, 2**40))
    return sum(figures.requests for _, _, figures in rows)
