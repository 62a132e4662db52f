"""Faults of what loaders read: the request that waits is told, nobody gets other weights, and a repair is enough."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_serve.core.adapter import AdapterRef
from tests.canary.asking import Canaries
from tests.canary.house import INSIDE, House
from tests.canary.questions import World
from tests.canary.watch import watching
from tests.faults.injecting import VICTIM, ask, blob_of, broken_fetch, kept, make_cold, register_victim, settle
from tests.hostile.sending import as_admin, call
from tests.oracle import save_adapter

pytestmark = pytest.mark.engines("thread", nightly=["process"])
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def house_settings() -> dict[str, Any]:
    """Room for all, so that canaries stay warm while loaders are broken."""
    return {"max_loras": 16}


@pytest.fixture(scope="module")
def folder(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)


@pytest.fixture(scope="module", autouse=True)
def truth(house: House, canaries: Canaries, folder: Path) -> str:
    """The victim's answer; and every canary has been loaded once."""
    register_victim(house, folder)
    with watching(house, canaries):
        pass
    return str(ask(house).json["choices"][0]["text"])


FETCHES: dict[str, tuple[BaseException, int]] = {
    "disk_error": (OSError(5, "injected"), 503),
    "too_many_files": (OSError(24, "injected"), 503),
    "permission": (PermissionError(13, "injected"), 503),
    "memory": (MemoryError("injected"), 503),
    "bug": (RuntimeError("injected"), 500),
    "end_of_the_thread": (SystemExit("injected"), 500),
    "interrupted": (KeyboardInterrupt("injected"), 500),
}


@pytest.mark.many(4)
@pytest.mark.engines("thread", alone=INSIDE)
@pytest.mark.parametrize("name", FETCHES)
def test_load_that_fails_ends_its_request_and_the_next_one_loads_again(
    house: House, canaries: Canaries, truth: str, name: str
) -> None:
    error, status = FETCHES[name]
    make_cold(house)
    left = [error]

    def fetch(adapter: AdapterRef, sound: Callable[[], Any]) -> Any:
        if adapter.name == VICTIM and left:
            raise left.pop()
        return sound()

    with watching(house, canaries) as watch, broken_fetch(house, fetch):
        watch.expected_in_log = ["injected", "request"]
        assert ask(house, timeout_ms=30_000).status == status
        assert ask(house).json["choices"][0]["text"] == truth


@pytest.mark.engines("thread", alone=INSIDE)
def test_load_that_hangs_keeps_only_its_own_requests_waiting(house: House, canaries: Canaries, truth: str) -> None:
    make_cold(house)
    gate = threading.Event()

    def fetch(adapter: AdapterRef, sound: Callable[[], Any]) -> Any:
        if adapter.name == VICTIM:
            gate.wait(120)
        return sound()

    with watching(house, canaries), broken_fetch(house, fetch):
        late = ask(house, timeout_ms=300)
        assert late.status in (503, 504)
        gate.set()
        assert ask(house).json["choices"][0]["text"] == truth


@pytest.mark.engines("thread", alone=INSIDE)
def test_stores_that_hang_for_two_adapters_do_not_keep_a_third_from_loading(
    house: House, canaries: Canaries, world: World, truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are threads for loads."""
    names = ["victim/hung-0", "victim/hung-1"]
    for number, name in enumerate(names):
        register_victim(house, save_adapter(world.model, world.root / "adapters" / f"hung-{number}", seed=number), name)
        make_cold(house, name)
    make_cold(house)
    gate = threading.Event()

    def fetch(adapter: AdapterRef, sound: Callable[[], Any]) -> Any:
        if adapter.name in names:
            gate.wait(120)
        return sound()

    try:
        with watching(house, canaries) as watch, broken_fetch(house, fetch):
            watch.expected_in_log = ["hangs for"]
            with monkeypatch.context() as patch:
                patch.setattr(house.loader._threads, "_timeout", 0.2)
                refusals = [ask(house, name, timeout_ms=30_000) for name in names]
            assert [reply.status for reply in refusals] == [503, 503]
            assert "does not answer" in refusals[0].json["error"]["message"]
            assert ask(house).json["choices"][0]["text"] == truth
            metrics = call(house, "GET", "/metrics").body.decode()
            assert "lora_serve_adapter_loads_hung_total 2.0" in metrics
            gate.set()
            settle(lambda: ask(house, names[0]).status == 200)
    finally:
        gate.set()
    for name in names:
        assert as_admin(house, "DELETE", f"/admin/adapters/{name}").status == 200


def other_weights(house: House, blob: Path) -> None:
    (blob / WEIGHTS).unlink()
    shutil.copy(blob_of(house, "acme/a") / WEIGHTS, blob / WEIGHTS)


def other_config(house: House, blob: Path) -> None:
    text = (blob / CONFIG).read_text()
    (blob / CONFIG).unlink()
    (blob / CONFIG).write_text(text.replace('"lora_alpha": 8', '"lora_alpha": 80'))


def one_bit(house: House, blob: Path) -> None:
    content = bytearray((blob / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (blob / WEIGHTS).unlink()
    (blob / WEIGHTS).write_bytes(content)


def truncated(house: House, blob: Path) -> None:
    content = (blob / WEIGHTS).read_bytes()
    (blob / WEIGHTS).unlink()
    (blob / WEIGHTS).write_bytes(content[:-100])


def empty(house: House, blob: Path) -> None:
    (blob / WEIGHTS).unlink()
    (blob / WEIGHTS).touch()


def missing_file(house: House, blob: Path) -> None:
    (blob / WEIGHTS).unlink()


def missing_blob(house: House, blob: Path) -> None:
    shutil.rmtree(blob)


def linked_file(house: House, blob: Path) -> None:
    (blob / WEIGHTS).unlink()
    (blob / WEIGHTS).symlink_to(blob_of(house, "globex/a") / WEIGHTS)


def linked_blob(house: House, blob: Path) -> None:
    shutil.rmtree(blob)
    blob.symlink_to(blob_of(house, "globex/b"))


def folder_as_file(house: House, blob: Path) -> None:
    (blob / WEIGHTS).unlink()
    (blob / WEIGHTS).mkdir()


def loops(house: House, blob: Path) -> None:
    (blob / WEIGHTS).unlink()
    (blob / WEIGHTS).symlink_to(blob / WEIGHTS)


def swapped_by_a_whole_blob(house: House, blob: Path) -> None:
    shutil.rmtree(blob)
    shutil.copytree(blob_of(house, "hooli/a"), blob)


def fifo(house: House, blob: Path) -> None:
    (blob / WEIGHTS).unlink()
    os.mkfifo(blob / WEIGHTS)


def zeros_without_end(house: House, blob: Path) -> None:
    (blob / WEIGHTS).unlink()
    (blob / WEIGHTS).symlink_to("/dev/zero")


def all_fifos(house: House, blob: Path) -> None:
    for file in list(blob.iterdir()):
        file.unlink()
        os.mkfifo(file)


def linked_elsewhere(house: House, blob: Path) -> None:
    """The right bytes, but not the store's own."""
    place = house.store / "elsewhere"
    shutil.move(blob / WEIGHTS, place)
    (blob / WEIGHTS).symlink_to(place)


DAMAGES = [
    other_weights, other_config, one_bit, truncated, empty, missing_file, missing_blob, linked_file, linked_blob,
    folder_as_file, loops, swapped_by_a_whole_blob, fifo, zeros_without_end, all_fifos, linked_elsewhere,
]  # fmt: skip


@pytest.mark.many(8)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_stored_files_that_are_not_what_was_registered_are_never_served(
    house: House, canaries: Canaries, truth: str, damage: Callable[[House, Path], None], tmp_path: Path
) -> None:
    blob = make_cold(house)
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["request", "adapter"]
        with kept(blob, tmp_path / "kept"):
            damage(house, blob)
            assert ask(house).status in (500, 503)
        assert ask(house).json["choices"][0]["text"] == truth  # a repair is enough


@pytest.mark.parametrize("damage", [other_weights, truncated, missing_blob], ids=lambda damage: damage.__name__)
def test_registering_the_same_content_again_heals_a_broken_blob(
    house: House, canaries: Canaries, truth: str, folder: Path, damage: Callable[[House, Path], None]
) -> None:
    damage(house, make_cold(house))
    with watching(house, canaries) as watch:
        watch.expected_in_log = ["request", "adapter"]
        assert ask(house).status in (500, 503)
        register_victim(house, folder)
        assert ask(house).json["choices"][0]["text"] == truth


def test_files_replaced_while_they_are_read_are_noticed(
    house: House, canaries: Canaries, truth: str, tmp_path: Path
) -> None:
    """Another adapter's weights come and go under the loaders, many times."""
    blob = make_cold(house)
    right, wrong = (blob / WEIGHTS).read_bytes(), (blob_of(house, "initech/a") / WEIGHTS).read_bytes()
    is_over = threading.Event()

    def flip() -> None:
        number = 0
        while not is_over.wait(0.001):
            number += 1
            aside = tmp_path / str(number)
            aside.write_bytes(wrong if number % 2 else right)
            aside.replace(blob / WEIGHTS)

    with kept(blob, tmp_path / "kept"):
        flipping = threading.Thread(target=flip)
        with watching(house, canaries) as watch:
            watch.expected_in_log = ["request", "adapter"]
            flipping.start()
            try:
                for _ in range(12):
                    reply = ask(house)
                    assert reply.status in (200, 500, 503)
                    assert reply.status != 200 or reply.json["choices"][0]["text"] == truth
                    make_cold(house)
            finally:
                is_over.set()
                flipping.join()


PREPARED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-10],
    "one_bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "empty": lambda content: b"",
    "other_magic": lambda content: b"LSPREP9\n" + content[8:],
    "giant_header": lambda content: content[:40] + b"\xff" * 8 + content[48:],
}


@pytest.mark.many(4)
@pytest.mark.parametrize("name", [*PREPARED, "of_another_adapter", "fifo", "zeros_without_end"])
def test_prepared_file_that_is_not_whole_or_anothers_is_left_for_the_adapters_own_files(
    house: House, canaries: Canaries, truth: str, name: str
) -> None:
    make_cold(house)
    assert ask(house).status == 200
    file = _prepared(house, VICTIM)
    make_cold(house, prepared=True)
    if name in PREPARED:
        file.write_bytes(PREPARED[name](file.read_bytes()))
    elif name == "of_another_adapter":
        file.write_bytes(_prepared(house, "acme/a").read_bytes())
    else:
        file.unlink()
        os.mkfifo(file) if name == "fifo" else file.symlink_to("/dev/zero")
    with watching(house, canaries):
        assert ask(house).json["choices"][0]["text"] == truth


def _prepared(house: House, name: str) -> Path:
    from tests.faults.injecting import settle

    blob = blob_of(house, name)
    settle(lambda: len(list(blob.glob("prepared-*"))) == 1)
    return next(blob.glob("prepared-*"))
