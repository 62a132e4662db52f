"""A model of random weights in this process, with adapters in its slots, and the batches that are measured on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_serve.adapters.checkpoint.saved import SavedAdapter, SavedLinear
from lora_serve.core.batch import Batch, Row, RowAdapter, SampleInput, SlotRef
from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.model.build import ModelParts, build_model

BLOCK_SIZE = 16
RANKS = (8, 16, 32)  # of an adapter set in turn
_GREEDY = SampleInput(SamplingParams(temperature=0.0), 0, 0, ())


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One adapter in a slot, and the bytes that a step reads of it."""

    slot: SlotRef
    num_bytes: int


class StepModel:
    """Batches of one kind are made here, so that every benchmark means the same by "16 rows of 16 adapters"."""

    def __init__(self, model: Path, num_slots: int, kv_bytes: int, dtype: str = "auto", **flags: Any) -> None:
        """`model`: a checkpoint's folder; `kv_bytes` of KV cache; `flags`: further settings."""
        settings = Settings(
            model=str(model), dtype=dtype, kv_cache_memory=kv_bytes, block_size=BLOCK_SIZE, max_loras=num_slots, **flags
        )
        self.parts: ModelParts = build_model(settings.part(ModelConfig), settings.part(EngineConfig), num_slots)
        self._num_loaded = 0

    @property
    def spec(self) -> ModelSpec:
        return self.parts.spec

    @property
    def kv_token_bytes(self) -> float:
        """Of one token over all layers, K and V."""
        return self.parts.memory.kv_bytes / self.parts.num_blocks / BLOCK_SIZE

    def load(self, ranks: Sequence[int], takes: Callable[[str], bool] = bool) -> list[LoadedAdapter]:
        """One adapter per rank on every linear layer but the output head whose path `takes` names, in bfloat16 as
        trainers save them.
        """
        found = []
        for rank in ranks:
            index = self._num_loaded
            saved = SavedAdapter(f"random-{index}", random_linears(self.spec, rank, index, takes))
            host = self.parts.fold(saved)
            slot = SlotRef(index, 1, saved.digest)
            self.parts.runner.load_slot(slot, host)
            found.append(LoadedAdapter(slot, host.num_bytes))
            self._num_loaded += 1
        return found

    def unload(self, adapters: Sequence[LoadedAdapter]) -> None:
        """Free their slots' weights; slots are not given out again."""
        for adapter in adapters:
            self.parts.runner.clear_slot(adapter.slot.index)

    def touch(self, num_blocks: int) -> None:
        """Write KV blocks 1 .. `num_blocks` once: memory that was never written is read from one page of zeros."""
        assert num_blocks <= self.parts.num_blocks, f"{num_blocks} KV blocks are needed, {self.parts.num_blocks} there"
        fresh = tuple(range(1, num_blocks + 1))
        self.parts.runner.run(Batch(decode_batch([None], 1).rows, fresh))

    def decode_floor_bytes(self, num_rows: int, num_keys: int, adapters: Sequence[LoadedAdapter]) -> int:
        """What a decode step must read beside the base's weights: each adapter once, and every row's keys."""
        different = {adapter.slot.index: adapter.num_bytes for adapter in adapters}
        return int(sum(different.values()) + num_rows * num_keys * self.kv_token_bytes)


def random_linears(
    spec: ModelSpec, rank: int, seed: int, takes: Callable[[str], bool] = bool
) -> dict[str, SavedLinear]:
    """Plain LoRA of `rank` on every linear layer but the output head that `takes` names."""
    generator = torch.Generator().manual_seed(seed)

    def factor(width: int) -> torch.Tensor:
        return torch.randn(rank, width, generator=generator).to(torch.bfloat16)

    shapes = {path: shape for path, shape in spec.linears.items() if path != spec.output_head and takes(path)}
    return {path: SavedLinear(factor(s.in_features), factor(s.out_features), 1e-3) for path, s in shapes.items()}


def decode_batch(adapters: Sequence[LoadedAdapter | None], num_keys: int) -> Batch:
    """One decode row per element, each attending to `num_keys` keys, its own included, in blocks of its own."""
    width = blocks_of(num_keys)
    rows = []
    for i, adapter in enumerate(adapters):
        table = tuple(range(1 + i * width, 1 + (i + 1) * width))
        rows.append(Row(i, (5 + i,), num_keys - 1, table, _uses(adapter), _GREEDY, None))
    return Batch(tuple(rows), ())


def prefill_batch(adapters: Sequence[LoadedAdapter | None], num_tokens: int) -> Batch:
    """One whole prompt of `num_tokens` per element, its last token sampled."""
    width = blocks_of(num_tokens)
    rows = []
    for i, adapter in enumerate(adapters):
        table = tuple(range(1 + i * width, 1 + (i + 1) * width))
        rows.append(Row(i, tuple(range(5, 5 + num_tokens)), 0, table, _uses(adapter), _GREEDY, None))
    return Batch(tuple(rows), ())


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def _uses(adapter: LoadedAdapter | None) -> tuple[RowAdapter, ...]:
    return () if adapter is None else (RowAdapter(adapter.slot),)
