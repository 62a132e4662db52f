"""Random histories of acts, kill -9 and lost, damaged or older catalogs: every adapter whose registration was
acknowledged, and its deletion not, is served again with its own digest, as its id last meant it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from lora_serve.adapters.checkpoint.content import adapter_digest
from tests.redis_server import RedisServer
from tests.stateful.history import Actor, History, actor
from tests.tiers import mostly_nightly

LAYER = "model.layers.0.self_attn.q_proj"
NUM_CONTENTS = 6
SEEDS = pytest.mark.parametrize("seed", mostly_nightly(range(100), 0))


def num_rounds(seed: int) -> int:
    """That which is run by day is short."""
    return 1 if seed == 0 else 4


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


@SEEDS
def test_nothing_acknowledged_is_lost_with_its_catalog(house: House, tmp_path: Path, seed: int) -> None:
    History(seed, house.actor, tmp_path / "store", house.digests).run(num_rounds(seed))


@SEEDS
def test_nothing_acknowledged_is_lost_with_redis(
    house: House, tmp_path: Path, seed: int, shared_redis: RedisServer
) -> None:
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    History(seed, house.actor, tmp_path / "store", house.digests, shared_redis.url).run(num_rounds(seed))
