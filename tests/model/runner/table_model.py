"""A model without layers: logits are looked up by a sum over all that K and V are a function of.

It keeps one number per token in the cache's pool, made of its id, its position and its adapter, and a token's logits
are a row of a table that the sum over it and those before it decides: what is read from a wrong place, or too late,
gives other logits. Real are the packer, the buffers and graphs of steps (recorded), the cache and the sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import InternalError
from lora_serve.model.kv_cache import KVCache, KVShape
from lora_serve.model.runner.graphs import StepGraphs
from lora_serve.model.runner.model_runner import ModelRunner
from lora_serve.model.step_context import LoraTokens, StepInputs, TiledRows
from tests.model.recorded_call import RecordedCall

NUM_TOKENS = 300  # of the vocabulary
_NUM_STATES = 97
_CPU = torch.device("cpu")


class TableSlots:
    """Stands for `LoraSlots`: an adapter is a number that is added, in the memory that graphs read."""

    def __init__(self, num_slots: int = 16) -> None:
        self.num_slots, self.max_rank, self.expected = num_slots, 8, 0
        self.shifts = torch.zeros(num_slots + 1, dtype=torch.float64)  # the last is the base model's
        self._owners: dict[int, SlotRef] = {}

    def load(self, slot: SlotRef, adapter: Any) -> None:
        self.clear(slot.index)
        self._owners[slot.index] = slot
        self.shifts[slot.index] = 1 + sum(slot.digest.encode()) % 89

    def clear(self, index: int) -> None:
        self._owners.pop(index, None)
        self.shifts[index] = 0

    def check(self, slot: SlotRef) -> None:
        if self._owners.get(slot.index) != slot:
            raise InternalError("the slot is another's")

    def has_changes(self, slot: int) -> bool:
        return False

    def expect(self, slots: frozenset[int]) -> int:
        return 0

    def vocab_size(self, slot: int) -> int:
        return 0


class TableModel:
    """Stands for `BaseModel`."""

    reads_tiles = True

    def __init__(self, cache: KVCache, slots: TableSlots) -> None:
        self.spec = SimpleNamespace(vocab_size=NUM_TOKENS)
        self.compiled = SimpleNamespace(seconds=0.0)
        self.table = 3 * torch.randn(_NUM_STATES, NUM_TOKENS, generator=torch.Generator().manual_seed(5))
        self._cache, self._slots = cache, slots

    def logits(self, step: StepInputs) -> Tensor:
        (ids,), (positions,), size = step.token_ids, step.position_ids, self._cache.block_size
        shifts = self._slots.shifts[_slots_of(step.lora, len(ids))]
        pool = self._cache._pools[0].view(-1)[: self._cache._pools[0].shape[2] * size]  # K of the only layer
        pool.index_copy_(0, step.cache_positions, ((ids + 1) * (positions + 3) + 7 * shifts) % 1009)
        keys = pool.view(-1, size)
        sums = torch.zeros(len(ids), dtype=torch.float64)
        if step.decode.num_rows:
            read = keys[step.decode.block_table].flatten(1)
            seen = torch.arange(read.shape[1])[None] < step.decode.lengths[:, None]
            sums[: step.decode.num_rows].copy_((read * seen).sum(1))
        for row in step.prefill:
            until = keys[row.blocks].flatten().cumsum(0)
            sums[row.start : row.end] = until[row.context : row.context + row.end - row.start]
        if step.tiled is not None:
            self._add_tiles(keys, step.tiled, sums)
        return self.table[(sums.long() % _NUM_STATES)[step.logit_positions]]

    @staticmethod
    def _add_tiles(keys: Tensor, tiled: TiledRows, sums: Tensor) -> None:
        first, count, position, line = (column[:, None] for column in tiled.tiles.unbind(1))
        offsets = torch.arange(16)[None]
        until = keys[tiled.block_table[line[:, 0]]].flatten(1).cumsum(1)
        own = until.gather(1, (position + offsets).clamp(max=until.shape[1] - 1)) * (offsets < count)
        sums.index_add_(0, ((first + offsets) * (offsets < count)).flatten(), own.flatten())


def _slots_of(passes: tuple[LoraTokens, ...], num_tokens: int) -> Tensor:
    """The slot of each token, -1 for the base model's."""
    if passes and passes[0].on_device is not None:
        return passes[0].on_device.slots
    slots = torch.full((num_tokens,), -1)
    for segment in passes[0].segments if passes else ():
        slots[segment.start : segment.end] = segment.slot
    return slots


class TableWorld:
    """An ordinary runner (`plain`) and one that captures over the same cache and slots."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, max_rows: int = 8) -> None:
        self.recorders: list[RecordedCall] = []
        self.cache = KVCache(KVShape.alike(1, 1, 1, torch.float64), num_blocks + 1, block_size, _CPU, 3)
        self.slots = TableSlots()
        self.model = TableModel(self.cache, self.slots)
        parts: tuple[Any, ...] = self.model, self.cache, self.slots
        self.graphs = StepGraphs(*parts, max_rows, self._new_pool)
        self.plain = ModelRunner(*parts, _CPU)
        self.captured = ModelRunner(*parts, _CPU, self.graphs)

    def _new_pool(self) -> Callable[[], RecordedCall]:
        return lambda: RecordedCall(self.recorders)
