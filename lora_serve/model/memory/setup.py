"""Measures the loaded model's steps and lays the KV pool that leaves room for them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lora_serve.adapters.checkpoint.weights.zeros import dummy_adapter
from lora_serve.core.batch import BlockCopy, BlockMoves, RowAdapter, SlotRef
from lora_serve.core.config import EngineConfig
from lora_serve.core.memory import ActivationModel, MemoryPlan
from lora_serve.model.base_model import BaseModel
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.folding import fold
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.memory.activation_probe import ActivationProbe
from lora_serve.model.memory.plan import DeviceFacts, share_out
from lora_serve.model.runner.model_runner import ModelRunner
from lora_serve.model.system.device_memory import free_memory, peak_meter

_PROBE_SLOT = 0
_COPIES = 4


@dataclass(frozen=True, slots=True)
class MemorySetup:
    """The parts whose memory is shared out. The pool has no blocks yet but its spare ones."""

    base: BaseModel
    runner: ModelRunner
    cache: KVCache
    slots: LoraSlots
    config: EngineConfig

    def run(self, num_slots: int, adapter_bytes: int | None) -> MemoryPlan:
        """Measure, share out, and give the pool its blocks."""
        spec, cache = self.base.spec, self.cache
        activations = self._learn()
        is_cuda = self.base.device.type == "cuda"
        free = free_memory(self.base.device)
        limit = self.config.memory_limit if self.config.memory_limit is not None else free + spec.num_bytes
        block_bytes = cache.shape.block_bytes(cache.block_size)
        facts = DeviceFacts(is_cuda, limit, free, block_bytes)
        shares = share_out(facts, spec, self.config, activations, num_slots, adapter_bytes)
        cache.resize(shares.num_blocks + 1, shares.num_host_blocks)
        return MemoryPlan(
            limit,
            spec.num_bytes,
            block_bytes * shares.num_blocks,
            shares.adapter_bytes,
            activations,
            shares.num_host_blocks,
            self._copy_seconds() if shares.num_host_blocks else 0.0,
            peak_meter(self.base.device, spec.num_bytes),
        )

    def _learn(self) -> ActivationModel:
        adapter = fold(dummy_adapter(self.base.spec), base=self.base)
        slot = SlotRef(_PROBE_SLOT, 1, adapter.digest)
        self.slots.load(slot, adapter)
        try:
            return self._probe().learn(RowAdapter(slot))
        finally:
            self.slots.clear(_PROBE_SLOT)

    def _probe(self) -> ActivationProbe:
        return ActivationProbe(
            self.runner.run,
            self.base.spec,
            self.base.device,
            self._spare_block(),
            self.cache.block_size,
            self.config.batch.max_num_batched_tokens,
        )

    def _copy_seconds(self) -> float:
        """Of one block to host memory or back, the best of a few."""
        copy = (BlockCopy(self._spare_block(), 0),)
        seconds = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            self.cache.move(BlockMoves(copy, copy))
            seconds.append(time.perf_counter() - start)
        return min(seconds) / 2

    def _spare_block(self) -> int:
        return self.cache.spare_blocks(1, 1)[0][0]
