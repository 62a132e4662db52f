"""The checkpoints of the benchmarks: `lora_serve.random_weights` under the names they use here."""

from __future__ import annotations

import json
from pathlib import Path

from lora_serve.random_weights import LORA_TARGETS, RANKS, SHAPES, VOCAB_SIZE, checkpoints
from lora_serve.random_weights.checkpoints import make_model

__all__ = [
    "LORA_TARGETS", "RANKS", "SHAPES", "VOCAB_SIZE", "make_adapters", "make_checkpoints", "num_weight_bytes"
]  # fmt: skip


def make_checkpoints(cache: Path, shape: str, num_adapters: int, seed: int) -> tuple[Path, dict[str, Path]]:
    """The model's folder and adapter id -> folder, of ranks 8, 16, 32 in turn; made once per shape and seed."""
    return make_model(cache, shape, seed), checkpoints.make_adapters(cache, shape, num_adapters, seed)


def make_adapters(cache: Path, shape: str, count: int, seed: int, rank: int) -> dict[str, Path]:
    """Adapter id -> folder of `count` adapters of one rank."""
    return checkpoints.make_adapters(cache, shape, count, seed, (rank,), tenant=f"rank{rank}")


def num_weight_bytes(folder: Path) -> int:
    """Bytes of the tensors in a checkpoint's safetensors files, headers left out."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(
            entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values() if "dtype" in entry
        )
    return total
