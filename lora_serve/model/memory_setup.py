"""Measures the loaded model's steps and lays the KV pool that leaves memory for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lora_serve.adapters.checkpoint.saved import dummy_adapter
from lora_serve.core.batch import (
    ActivationModel,
    Batch,
    BlockCopy,
    BlockMoves,
    MemoryLoad,
    MemoryPlan,
    Row,
    RowAdapter,
    RowOutput,
    SampleInput,
    SlotRef,
)
from lora_serve.core.config import EngineConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import SamplingParams
from lora_serve.model.base_model import BaseModel
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.folding import fold
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.runner.model_runner import ModelRunner
from lora_serve.model.system.device_memory import free_memory, peak_bytes, peak_meter

_log = logging.getLogger(__name__)
_MARGIN = 1.1
_CPU_TOKENS, _CUDA_TOKENS = 32, 1024  # of the largest probe
_KEYS = 1024
_LOGIT_ROWS = 16
_DECODE_ROWS = 4
_SAMPLED = SampleInput(SamplingParams(temperature=0.7, top_p=0.9, top_k=8, logprobs=1), 0, 0, ())
_CPU_SHARE, _CUDA_SHARE = 0.25, 0.85  # of the memory that is free, for the KV cache
_CUDA_SWAP_SPACE = 4 * 2**30
_USUAL_RANK = 16  # of the adapters that memory is kept for where no budget was given
_MAX_GRAPH_SHARE = 0.1  # of all memory, for captured steps
_MAX_ADAPTER_SHARE = 0.25  # and at most this share of what weights and steps leave
_PROBE_SLOT = 0
_COPIES = 4


@dataclass(frozen=True, slots=True)
class ActivationProbe:
    """`block`: an unused KV block, which every probe row reads and writes over and over."""

    run: Callable[[Batch], list[RowOutput]]
    spec: ModelSpec
    device: torch.device
    block: int
    block_size: int
    max_tokens: int  # of a step

    def learn(self, adapter: RowAdapter) -> ActivationModel:
        """Measures with and without `adapter`, one that is in a slot."""
        adapters = (adapter,)
        most = _CUDA_TOKENS if self.device.type == "cuda" else _CPU_TOKENS
        num_tokens = max(2, min(most, self.max_tokens, self.spec.max_model_len))
        keys = max(2, min(_KEYS, self.spec.max_model_len))
        few = min(num_tokens, max(2, keys // 2))
        self._peak(self._row(0, 1, 1))  # what is allocated once and kept
        fixed = self._peak(self._row(0, 1, 1))
        with_adapter = self._peak(self._row(0, 1, 1, adapters))
        tokens = self._peak(self._row(0, num_tokens, num_tokens, adapters))
        logits = self._peak(*(self._row(i, 1, 1) for i in range(_LOGIT_ROWS)))
        decode = self._peak(*(self._row(i, 1, keys) for i in range(_DECODE_ROWS)))
        chunk = self._peak(self._row(0, 2, keys))
        scores = self._peak(self._row(0, few, keys))
        per_token = (tokens - fixed) / num_tokens
        per_chunk_key = (chunk - fixed) / keys
        explained = fixed + per_token * few + per_chunk_key * keys
        coefficients = (
            fixed,
            per_token,
            (logits - fixed) / _LOGIT_ROWS,
            with_adapter - fixed,
            (decode - fixed) / (_DECODE_ROWS * keys),
            per_chunk_key,
            (scores - explained) / (few * keys),
        )
        return ActivationModel(*(max(0.0, _MARGIN * coefficient) for coefficient in coefficients))

    def _row(self, sequence_id: int, count: int, keys: int, adapters: tuple[RowAdapter, ...] = ()) -> Row:
        """A row of the last `count` of `keys` tokens."""
        table = (self.block,) * -(-keys // self.block_size)
        return Row(sequence_id, (0,) * count, keys - count, table, adapters, _SAMPLED, None)

    def _peak(self, *rows: Row) -> int:
        return peak_bytes(self.device, lambda: self.run(Batch(rows, (self.block,))))


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device's memory in bytes, as it was found."""

    is_cuda: bool
    limit: int  # for all that is ours
    free_now: int  # with the weights loaded
    block_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """`num_blocks`: KV blocks; `adapter_bytes`: of device slots, None: no limit but their number."""

    num_blocks: int
    adapter_bytes: int | None
    num_host_blocks: int


def limit_of(config: EngineConfig, gpu_bytes: int | None, found: int) -> int:
    """Bytes for all that is ours. `gpu_bytes`: the whole memory of a GPU; None on a CPU. `found`: free at start."""
    if config.memory_limit is not None:
        return config.memory_limit
    if config.gpu_memory_utilization is None:
        return found
    if gpu_bytes is None:
        _log.info("--gpu-memory-utilization means nothing on a CPU: --memory-limit bounds its memory")
        return found
    return int(gpu_bytes * config.gpu_memory_utilization)


def share_out(
    facts: DeviceFacts,
    spec: ModelSpec,
    config: EngineConfig,
    activations: ActivationModel,
    num_slots: int,
    adapter_bytes: int | None,
    captured: MemoryLoad | None = None,
) -> MemoryShares:
    """Raises ConfigError if not even one sequence of full length fits. `adapter_bytes`: the configured budget.
    `captured`: the largest step of a CUDA graph; graphs for which there is no memory are not captured.
    """
    left = facts.limit - spec.num_bytes - activations.num_bytes(largest_step(spec, config))
    if captured is not None:
        left -= min(activations.num_bytes(captured), int(_MAX_GRAPH_SHARE * facts.limit))
    if adapter_bytes is None and (facts.is_cuda or config.memory_limit is not None):
        adapter_bytes = min(_usual_bytes(spec, num_slots), int(max(0, left) * _MAX_ADAPTER_SHARE))
    num_blocks = _num_blocks(facts, spec, config, activations, left - (adapter_bytes or 0))
    space = config.swap_space if config.swap_space is not None else _CUDA_SWAP_SPACE if facts.is_cuda else 0
    return MemoryShares(num_blocks, adapter_bytes, space // facts.block_bytes)


def largest_step(spec: ModelSpec, config: EngineConfig) -> MemoryLoad:
    """As many tokens and rows as a step may have, a chunk of the longest prompt among them.

    The keys of decoding rows are not in it: they are charged to the blocks that hold them.
    """
    tokens, rows = config.batch.max_num_batched_tokens, config.batch.max_num_seqs
    chunk = min(tokens, spec.max_model_len)
    return MemoryLoad(tokens, rows, rows, longest_chunk=spec.max_model_len, num_scores=chunk * spec.max_model_len)


def _num_blocks(
    facts: DeviceFacts, spec: ModelSpec, config: EngineConfig, activations: ActivationModel, left: int
) -> int:
    """The number of blocks that budget and memory pay for; at least one sequence of full length must fit."""
    per_sequence = -(-spec.max_model_len // config.block_size)
    wanted = per_sequence * config.batch.max_num_seqs
    share = _CUDA_SHARE if facts.is_cuda else _CPU_SHARE
    budget = config.kv_cache_memory if config.kv_cache_memory is not None else int(facts.free_now * share)
    if budget // facts.block_bytes < per_sequence:
        raise ConfigError(
            f"--kv-cache-memory: {budget} bytes hold {budget // facts.block_bytes * config.block_size} tokens, fewer "
            f"than one sequence of --max-model-len {spec.max_model_len}; give at least "
            f"{per_sequence * facts.block_bytes} bytes or a smaller --max-model-len"
        )
    in_use = facts.block_bytes + int(activations.per_decode_key * config.block_size)
    if left // in_use < per_sequence:
        raise ConfigError(
            f"--memory-limit: of {facts.limit} bytes, {spec.num_bytes} of weights, the adapters and the largest "
            f"step leave {max(0, left)} for KV blocks; one sequence of --max-model-len {spec.max_model_len} needs "
            f"{per_sequence * in_use}. Give more, or a smaller --max-model-len or --max-num-batched-tokens"
        )
    return min(wanted, budget // facts.block_bytes, left // in_use)


def _usual_bytes(spec: ModelSpec, num_slots: int) -> int:
    weights = sum(_USUAL_RANK * (shape.in_features + shape.out_features) for shape in spec.linears.values())
    return num_slots * weights * (4 if spec.dtype == "float32" else 2)


@dataclass(frozen=True, slots=True)
class MemorySetup:
    """The parts whose memory is shared out. The pool has no blocks yet but its spare ones."""

    base: BaseModel
    runner: ModelRunner
    cache: KVCache
    slots: LoraSlots
    config: EngineConfig
    captured: MemoryLoad | None  # see `share_out`

    def run(self, num_slots: int, adapter_bytes: int | None) -> MemoryPlan:
        """Measures, shares out, and gives the pool its blocks."""
        spec, cache = self.base.spec, self.cache
        activations = self._learn()
        is_cuda = self.base.device.type == "cuda"
        free = free_memory(self.base.device)
        gpu_bytes = torch.cuda.mem_get_info(self.base.device)[1] if is_cuda else None
        limit = limit_of(self.config, gpu_bytes, free + spec.num_bytes)
        block_bytes = cache.shape.block_bytes(cache.block_size)
        facts = DeviceFacts(is_cuda, limit, free, block_bytes)
        shares = share_out(facts, spec, self.config, activations, num_slots, adapter_bytes, self.captured)
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
        probe = ActivationProbe(
            self.runner.run, self.base.spec, self.base.device, self._spare_block(), self.cache.block_size,
            self.config.batch.max_num_batched_tokens,
        )  # fmt: skip
        self.slots.load(slot, adapter)
        try:
            return probe.learn(RowAdapter(slot))
        finally:
            self.slots.clear(_PROBE_SLOT)

    def _copy_seconds(self) -> float:
        """The time of copying one block to host memory or back, the best of a few."""
        copy = (BlockCopy(self._spare_block(), 0),)
        seconds = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            self.cache.move(BlockMoves(copy, copy))
            seconds.append(time.perf_counter() - start)
        return min(seconds) / 2

    def _spare_block(self) -> int:
        return self.cache.spare_blocks(1, 1)[0][0]
