"""Adapters that cost: while some of them are registered, another tenant's registration takes hardly longer."""

from __future__ import annotations

import json
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.canary.house import ADMIN, House
from tests.canary.questions import World
from tests.hostile.adapter_files import CONFIG, WEIGHTS, Files, files_of, tar
from tests.hostile.sending import Reply, as_admin, call

NUM_EVIL = 6


@pytest.fixture(scope="module")
def sound(world: World) -> Files:
    return files_of(world.adapters["acme/a"])


def upload(house: House, name: str, content: bytes) -> Reply:
    return call(house, "PUT", f"/admin/adapters/{name}", content, {**ADMIN, "Content-Type": "application/octet-stream"})


def with_targets(files: Files, pattern: str) -> bytes:
    return tar({**files, CONFIG: json.dumps(json.loads(files[CONFIG]) | {"target_modules": pattern}).encode()})


def with_names(files: Files, count: int) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 0]}
    table = {
        f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight": {
            **entry,
            "data_offsets": [4 * i, 4 * i + 4],
        }
        for i in range(count)
    }
    text = json.dumps(table).encode()
    return tar({**files, WEIGHTS: struct.pack("<Q", len(text)) + text + bytes(4 * count)})


EVIL = {
    "repeats": lambda files: with_targets(files, "(.*)*" * 6 + "$!"),
    "look_around": lambda files: with_targets(files, "(?!z)" + "(.*)*" * 6 + "$!"),
    "names": lambda files: with_names(files, 100_000),
}


def timed(house: House, name: str, content: bytes) -> float:
    started = time.monotonic()
    assert upload(house, name, content).status == 201
    seconds = time.monotonic() - started
    assert as_admin(house, "DELETE", f"/admin/adapters/{name}").status in (200, 204)
    return seconds


@pytest.mark.parametrize("kind", EVIL)
def test_x(house, sound, kind):
    evil = EVIL[kind](sound)
    quiet = max(timed(house, "good/a", tar(sound)) for _ in range(3))
    with ThreadPoolExecutor(NUM_EVIL) as threads:
        crowd = [threads.submit(upload, house, f"evil/{i}", evil) for i in range(NUM_EVIL)]
        time.sleep(0.3)
        loud = timed(house, "good/a", tar(sound))
        print(kind, "quiet", quiet, "loud", loud, [f.result().status for f in crowd])
