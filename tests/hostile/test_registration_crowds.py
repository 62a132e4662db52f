"""Adapters that cost: while some of them are registered, another tenant's registration takes hardly longer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lora_serve.adapters.checkpoint import module_patterns
from lora_serve.adapters.registration import registry
from tests.canary.house import ADMIN, House
from tests.canary.questions import World
from tests.faults.injecting import settle
from tests.hostile.adapter_files import CONFIG, WEIGHTS, Files, built, files_of, tar
from tests.hostile.sending import Reply, as_admin, call

SLACK = 2.0  # seconds, of a machine that does other things too


@pytest.fixture(scope="module")
def sound(world: World) -> Files:
    return files_of(world.adapters["acme/a"])


def upload(house: House, name: str, content: bytes) -> Reply:
    return call(house, "PUT", f"/admin/adapters/{name}", content, {**ADMIN, "Content-Type": "application/octet-stream"})


def seconds_of(house: House, content: bytes) -> float:
    """Of a registration of a tenant that has nothing to do with all this."""
    started = time.monotonic()
    assert upload(house, "good/a", content).status == 201
    seconds = time.monotonic() - started
    assert as_admin(house, "DELETE", "/admin/adapters/good/a").status in (200, 204)
    return seconds


def with_targets(pattern: str) -> Callable[[Files], bytes]:
    def build(files: Files) -> bytes:
        config = json.loads(files[CONFIG]) | {"target_modules": pattern}
        return tar({**files, CONFIG: json.dumps(config).encode()})

    return build


def with_names(files: Files) -> bytes:
    """As many as fit into the longest header that any file may have."""
    table = {
        f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight": {
            "dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]
        }
        for i in range(100_000)
    }  # fmt: skip
    return tar({**files, WEIGHTS: built(table, bytes(400_000))})


EVIL: dict[str, tuple[int, Callable[[Files], bytes]]] = {  # how many at once, and of which kind
    "repeats": (6, with_targets("(.*)*" * 6 + "$!")),
    "look_around": (3, with_targets("(?!z)" + "(.*)*" * 6 + "$!")),
    "names": (6, with_names),
}


@pytest.fixture(scope="module")
def bodies(sound: Files) -> dict[str, bytes]:
    return {kind: build(sound) for kind, (_, build) in EVIL.items()}


@pytest.fixture(scope="module")
def house_settings(bodies: dict[str, bytes]) -> dict[str, Any]:
    """None; but the bodies are made before the server starts, whose lag is watched: making them holds the GIL."""
    return {}


class Crowd:
    """Evil uploads of one tenant; `begun` is set once the first of them is being read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        sound = registry.read_artifact

        def read(*given: Any, **options: Any) -> Any:
            self.begun.set()
            return sound(*given, **options)

        monkeypatch.setattr(registry, "read_artifact", read)

    def send(self, house: House, content: bytes, count: int, threads: ThreadPoolExecutor) -> list[Any]:
        self.begun.clear()
        return [threads.submit(upload, house, f"evil/{number}", content) for number in range(count)]


def test_examination_that_does_not_end_is_nobody_elses(
    house: House, sound: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of one tenant: the first hangs until another tenant's was registered."""
    gate, read = threading.Event(), registry.read_artifact

    def hang(folder: Any, *given: Any, **options: Any) -> Any:
        if b"evil" in (folder / CONFIG).read_bytes():
            assert gate.wait(60)
        return read(folder, *given, **options)

    monkeypatch.setattr(registry, "read_artifact", hang)
    with ThreadPoolExecutor(3) as threads:
        sent = [threads.submit(upload, house, f"evil/{n}", with_targets("evil")(sound)) for n in range(3)]
        settle(lambda: house.services.registrations.is_busy("evil"))
        assert upload(house, "good/a", tar(sound)).status == 201
        gate.set()
        assert [reply.result().status for reply in sent] == [422] * 3
    assert as_admin(house, "DELETE", "/admin/adapters/good/a").status in (200, 204)


@pytest.mark.parametrize("kind", EVIL)
def test_registration_hardly_waits_for_another_tenants_that_cost(
    house: House, sound: Files, bodies: dict[str, bytes], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, good = EVIL[kind][0], tar(sound)
    quiet = max(seconds_of(house, good) for _ in range(3))
    monkeypatch.setattr(module_patterns, "CHILD_SECONDS", 0.3)
    crowd = Crowd(monkeypatch)
    with ThreadPoolExecutor(count) as threads:
        sent = crowd.send(house, bodies[kind], count, threads)
        assert crowd.begun.wait(60)
        beside = seconds_of(house, good)
        assert [reply.result().status for reply in sent] == [422] * count
    print(f"{kind}: {quiet:.2f} s alone, {beside:.2f} s beside {count} that cost")
    assert beside < 2 * quiet + SLACK
