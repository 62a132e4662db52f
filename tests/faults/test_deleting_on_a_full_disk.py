"""A full disk can be emptied: what frees space is done, and noted once there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.adapters.stores import files
from tests.canary.house import running, settings_of
from tests.canary.questions import World
from tests.faults.injecting import settle
from tests.faults.small_disks import SmallDisk
from tests.hostile.sending import as_admin

pytestmark = pytest.mark.engines("thread")


def test_deletion_is_done_on_a_full_disk_and_noted_afterwards(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(files, "MAX_PAUSE", 1.0)  # else it looks again after ten seconds
    disk = SmallDisk(tmp_path / "disk")
    if not disk.is_mounted:
        pytest.skip("no file system can be mounted here")
    try:
        with running(settings_of(world, disk.place / "store", auth="off")) as house:
            with disk.full():
                assert as_admin(house, "DELETE", "/admin/adapters/globex/b").status == 200  # no write has failed yet
                settle(lambda: house.services.store_monitor.test() is False)  # type: ignore[union-attr]
                refused = as_admin(house, "POST", "/admin/tenants", {"name": "new"})
                assert refused.status == 503
                reply = as_admin(house, "DELETE", "/admin/adapters/acme/a")
                assert reply.status == 200, (reply.json, house.log[-5:])
                assert as_admin(house, "GET", "/admin/adapters/acme/a").status == 404
                reply = as_admin(house, "POST", "/v1/unload_lora_adapter", {"lora_name": "acme/b"})
                assert (reply.status, as_admin(house, "GET", "/admin/adapters/acme/b").status) == (200, 404), reply.body
            settle(lambda: house.services.store_monitor.test())  # type: ignore[union-attr]
            lines = as_admin(house, "GET", "/admin/audit").json["data"]
            assert [line["outcome"] for line in lines if line["subject"] == "acme/a"] == [200]
        with running(settings_of(world, disk.place / "store", auth="off", lora_modules=())) as house:
            assert as_admin(house, "GET", "/admin/adapters/acme/a").status == 404
    finally:
        disk.close()
