"""Random histories of acts, kill -9 and lost, damaged or older catalogs: every adapter whose registration was
acknowledged, and its deletion not, is served again with its own digest, as its id last meant it.

LORA_SERVE_TEST_EXAMPLES=200 runs so many; LORA_SERVE_TEST_SEED=N begins with seed N.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from lora_serve.adapters.checkpoint.digest import adapter_digest
from tests.redis_server import RedisServer
from tests.stateful.history import Actor, History, actor

LAYER = "model.layers.0.self_attn.q_proj"
NUM_CONTENTS = 6
NUM_ROUNDS = 4 if "LORA_SERVE_TEST_EXAMPLES" in os.environ else 2
NUM_HISTORIES = int(os.environ.get("LORA_SERVE_TEST_EXAMPLES", "6"))
FIRST_SEED = int(os.environ.get("LORA_SERVE_TEST_SEED", "0"))


@dataclass(frozen=True)
class House:
    """The process that acts, and what its contents are called."""

    actor: Actor
    digests: list[str]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    root = tmp_path_factory.mktemp("contents")
    folders = [make_content(root / str(number), number) for number in range(NUM_CONTENTS)]
    with actor(json.dumps({LAYER: [16, 16]}), folders) as process:
        yield House(process, [adapter_digest(folder) for folder in folders])


def make_content(folder: Path, number: int) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(number)
    shapes = {"lora_A": (2, 16), "lora_B": (16, 2)}
    tensors = {
        f"base_model.model.{LAYER}.{name}.weight": draw.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + (NUM_HISTORIES + 1) // 2))
def test_nothing_acknowledged_is_lost_with_its_catalog(house: House, tmp_path: Path, seed: int) -> None:
    History(seed, house.actor, tmp_path / "store", house.digests).run(NUM_ROUNDS)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_HISTORIES // 2))
def test_nothing_acknowledged_is_lost_with_redis(
    house: House, tmp_path: Path, seed: int, shared_redis: RedisServer
) -> None:
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    History(seed, house.actor, tmp_path / "store", house.digests, shared_redis.url).run(NUM_ROUNDS)
