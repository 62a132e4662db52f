"""Faults put into a running house, at its seams: the runner, the loaders' fetch, files of the store."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, RowOutput, SlotRef
from tests.canary.house import House
from tests.hostile.sending import Reply, as_admin, post

Run = Callable[[Batch, Callable[[], list[RowOutput]]], list[RowOutput]]
VICTIM = "victim/x"
PATIENCE = 60.0


class FaultyRunner:
    """The house's own runner, but for what a test puts in its place."""

    def __init__(self, runner: Any, run: Run | None, load_slot: Callable[[SlotRef], None] | None) -> None:
        self._runner = runner
        self._run = run
        self._load_slot = load_slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch) -> list[RowOutput]:
        if self._run is None:
            return self._runner.run(batch)
        return self._run(batch, lambda: self._runner.run(batch))

    def load_slot(self, slot: SlotRef, adapter: Any) -> None:
        if self._load_slot is not None:
            self._load_slot(slot)
        self._runner.load_slot(slot, adapter)


@contextmanager
def broken_runner(
    house: House, run: Run | None = None, load_slot: Callable[[SlotRef], None] | None = None
) -> Iterator[None]:
    sound = house.engine.execution.runner
    house.engine.execution.runner = FaultyRunner(sound, run, load_slot)
    try:
        yield
    finally:
        house.engine.execution.runner = sound


@contextmanager
def broken_fetch(house: House, fetch: Callable[[AdapterRef, Callable[[], Any]], Any]) -> Iterator[None]:
    """What the loaders' threads call: `fetch(adapter, the sound way)`."""
    sound = house.loader._fetch
    house.loader._fetch = lambda adapter: fetch(adapter, lambda: sound(adapter))
    try:
        yield
    finally:
        house.loader._fetch = sound


def once(error: BaseException) -> Callable[..., Any]:
    """Raises at its first call, then lets through: for `run` and `fetch` alike."""
    lock, left = threading.Lock(), [error]

    def call(_: Any, sound: Callable[[], Any]) -> Any:
        with lock:
            found = left.pop() if left else None
        if found is not None:
            raise found
        return sound()

    return call


def register_victim(house: House, folder: Path, name: str = VICTIM) -> AdapterRef:
    reply = as_admin(house, "POST", "/admin/adapters", {"id": name, "source": str(folder)})
    assert reply.status in (200, 201), reply.body
    return ref_of(house, name)


def ref_of(house: House, name: str) -> AdapterRef:
    entry = house.services.catalog.snapshot.entries[name]
    return entry.ref(entry.default)


def ask(house: House, model: str = VICTIM, **fields: Any) -> Reply:
    body = {"model": model, "prompt": "how are you", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    return post(house, "/v1/completions", body)


def make_cold(house: House, name: str = VICTIM, *, prepared: bool = False) -> Path:
    """Off the device and out of host memory; its blob. `prepared`: the file for fast loads stays."""
    blob = blob_of(house, name)
    settle(lambda: not is_preparing(house))  # nor is a file for fast loads on its way
    assert as_admin(house, "POST", f"/admin/adapters/{name}/evict").status == 200
    if not prepared:
        for file in blob.glob("prepared-*"):
            file.unlink()
    return blob


def is_preparing(house: House) -> bool:
    """True while an engine's loaders are busy; of one elsewhere only the files are seen, for a while."""
    if house.has_engine:
        return house.loader.is_busy
    wait = threading.Event()
    return any(wait.wait(0.02) or any((folder / "tmp").iterdir()) for folder in [_disk_of(house)] * 10)


def _disk_of(house: House) -> Path:
    return house.store if house.settings.redis_url is None else house.store / "cache"


def blob_of(house: House, name: str) -> Path:
    """On this machine, which is all there is of it unless replicas share their store."""
    return _disk_of(house) / "blobs" / ref_of(house, name).digest.removeprefix("sha256:")


def settle(is_true: Callable[[], bool]) -> None:
    deadline, wait = time.monotonic() + PATIENCE, threading.Event()
    while not is_true():
        assert time.monotonic() < deadline
        wait.wait(0.01)


@contextmanager
def kept(folder: Path, aside: Path) -> Iterator[None]:
    """The folder is as it was afterwards, whatever happens to it."""
    shutil.copytree(folder, aside)
    try:
        yield
    finally:
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(aside, folder)


def error_of(reply: Reply) -> Any:
    return json.loads(reply.body)["error"]
