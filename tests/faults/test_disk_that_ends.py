"""A disk that the kernel makes read-only under a running server, open files and all, as ext4 does after an error."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.canary.asking import Canaries
from tests.canary.house import ADMIN
from tests.canary.questions import World
from tests.e2e.plain_http import call
from tests.e2e.processes import eventually
from tests.engine_choice import EngineHost
from tests.faults.changing import ids_of
from tests.faults.outside import arguments, ask_all, asking
from tests.oracle import save_adapter

pytestmark = [
    pytest.mark.nightly,  # by day: tests/faults/test_read_only_start.py
    pytest.mark.timeout(600),
    pytest.mark.engines("thread", nightly=["process"]),
]


class FailingDisk:
    """An ext4 of 64 MiB at `place`, for root."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._image = place.with_suffix(".image")
        place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(64 * 2**20)
        _run("mkfs.ext4", "-q", "-F", self._image)
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", "loop,errors=remount-ro", self._image, self.place)

    def fail(self) -> None:
        """The kernel meets an error of the file system."""
        device = _run("findmnt", "-no", "SOURCE", self.place).strip()
        Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("by a test")

    def mend(self) -> None:
        """Nobody may use it meanwhile."""
        _run("umount", self.place)
        subprocess.run(["e2fsck", "-fy", self._image], check=False, capture_output=True)
        self.mount()

    def close(self) -> None:
        _run("umount", self.place)


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    disk = FailingDisk(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.fixture(scope="module")
def folder(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)


def register(process: ServerProcess, folder: Path, name: str) -> int:
    reply = call(f"{process.url}/admin/adapters", {"id": name, "source": str(folder)}, ADMIN)
    assert reply.status == 201 or "Retry-After" in reply.headers
    return reply.status


def test_disk_that_becomes_read_only_ends_no_answer_and_loses_nothing(
    engine_host: EngineHost, world: World, canaries: Canaries, disk: FailingDisk, folder: Path, tmp_path: Path
) -> None:
    store = disk.place / "store"
    with engine_host.serving(arguments(world, store, is_first=True), tmp_path / "log") as process:
        assert register(process, folder, "kept/x") == 201
        assert call(f"{process.url}/admin/adapters/kept/x/evict", {}, ADMIN).status == 200
        with asking(process, canaries, may_refuse=False):
            disk.fail()
            assert register(process, folder, "lost/x") == 503
            eventually(lambda: "read_only" in call(f"{process.url}/ready").json, "it does not say so")
            assert call(f"{process.url}/health").status == 200
            body = {"model": "kept/x", "prompt": "x", "max_tokens": 2}
            assert call(f"{process.url}/v1/completions", body).status == 200, "what is stored is loaded"
            assert register(process, folder, "lost/y") == 503
        assert process.stop() == 0
    disk.mend()
    with engine_host.serving(arguments(world, store, is_first=False), tmp_path / "again") as process:
        assert "kept/x" in ids_of(process)
        assert not {"lost/x", "lost/y"} & ids_of(process)
        assert register(process, folder, "new/x") == 201
        ask_all(process, canaries)
