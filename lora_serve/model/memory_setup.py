"""Measures the loaded model's steps and lays the KV pool that leaves memory for them."""

from __future__ import annotations

import logging
import operator
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
    block_bytes: tuple[int, ...]  # by kind of layers


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """`num_blocks`: KV blocks by kind of layers; `adapter_bytes`: of device slots, None: no limit but their number."""

    num_blocks: tuple[int, ...]
    adapter_bytes: int | None
    num_host_blocks: tuple[int, ...]


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
    kv_bytes = _bytes_of(num_blocks, facts.block_bytes)
    return MemoryShares(num_blocks, adapter_bytes, tuple(space * count // kv_bytes for count in num_blocks))


def largest_step(spec: ModelSpec, config: EngineConfig) -> MemoryLoad:
    """As many tokens and rows as a step may have, a chunk of the longest prompt among them.

    The keys of decoding rows are not in it: they are charged to the blocks that hold them.
    """
    tokens, rows = config.batch.max_num_batched_tokens, config.batch.max_num_seqs
    chunk = min(tokens, spec.max_model_len)
    return MemoryLoad(tokens, rows, rows, longest_chunk=spec.max_model_len, num_scores=chunk * spec.max_model_len)


def _num_blocks(
    facts: DeviceFacts, spec: ModelSpec, config: EngineConfig, activations: ActivationModel, left: int
) -> tuple[int, ...]:
    """The number of blocks that budget and memory pay for, by kind; at least one sequence of full length must fit."""
    share = _CUDA_SHARE if facts.is_cuda else _CPU_SHARE
    budget = config.kv_cache_memory if config.kv_cache_memory is not None else int(facts.free_now * share)
    need = BlockNeeds.of(spec, config)
    if budget < _bytes_of(need.least, facts.block_bytes):
        held = budget // sum(facts.block_bytes) * config.block_size
        raise ConfigError(
            f"--kv-cache-memory: {budget} bytes hold {held} tokens, fewer than one sequence of --max-model-len "
            f"{spec.max_model_len} needs; give at least {_bytes_of(need.least, facts.block_bytes)} bytes or a smaller "
            "--max-model-len"
        )
    # the keys of a row's whole table are read, though blocks before its window are none of its own
    keys = int(activations.per_decode_key * config.block_size)
    in_use = (facts.block_bytes[0] + keys, *facts.block_bytes[1:])
    least = _bytes_of(need.least, in_use) + (need.longest - need.least[0]) * keys
    if left < least:
        raise ConfigError(
            f"--memory-limit: of {facts.limit} bytes, {spec.num_bytes} of weights, the adapters and the largest "
            f"step leave {max(0, left)} for KV blocks; one sequence of --max-model-len {spec.max_model_len} needs "
            f"{least}. Give more, or a smaller --max-model-len or --max-num-batched-tokens"
        )
    shares = need.shared(budget, facts.block_bytes), need.shared(left, in_use)
    return tuple(map(min, zip(*shares, strict=True)))


def _bytes_of(num_blocks: tuple[int, ...], block_bytes: tuple[int, ...]) -> int:
    return sum(map(operator.mul, num_blocks, block_bytes))


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """The numbers of blocks that sequences can use, by kind of layers."""

    longest: int  # of a sequence of full length
    least: tuple[int, ...]  # with which it runs alone
    most: int  # of all rows, if they were of full length
    ever: int  # that all rows hold at a time of the last kind

    @staticmethod
    def of(spec: ModelSpec, config: EngineConfig) -> BlockNeeds:
        """A row holds what its next token sees, the block that this begins in, and one in which it goes on, while
        another fills; a step holds all its tokens beside that.
        """
        size, rows, windows = config.block_size, config.batch.max_num_seqs, spec.windows
        longest = -(-spec.max_model_len // size)
        held = [longest if window is None else min(longest, -(-window // size) + 3) for window in windows]
        step = -(-config.batch.max_num_batched_tokens // size)
        least = tuple(
            longest if window is None else min(longest, n + step) for n, window in zip(held, windows, strict=True)
        )
        return BlockNeeds(longest, least, longest * rows, min(longest * rows, held[-1] * rows + step))

    def shared(self, num_bytes: int, costs: tuple[int, ...]) -> tuple[int, ...]:
        """The blocks of each kind for so many bytes, if one costs so much.

        Layers with a window get what they can ever use, but no more than if both had as many: so no work has less room
        than that. The others get the rest, and the first what these cannot use.
        """
        first, *others = costs
        alike = num_bytes // sum(costs)
        if not others:
            return (min(self.most, alike),)
        second = others[0]
        windowed = max(self.least[1], min(self.ever, alike))
        seeing_all = max(self.longest, min(self.most, (num_bytes - windowed * second) // first))
        return seeing_all, min(self.most, (num_bytes - seeing_all * first) // second)


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
        block_bytes = tuple(cache.shape.block_bytes(cache.block_size, kind) for kind in range(cache.shape.num_kinds))
        facts = DeviceFacts(is_cuda, limit, free, block_bytes)
        shares = share_out(facts, spec, self.config, activations, num_slots, adapter_bytes, self.captured)
        num_blocks, num_host_blocks = shares.num_blocks, shares.num_host_blocks
        cache.resize(num_blocks[0] + 1, num_host_blocks[0], (num_blocks[-1] + 1, num_host_blocks[-1]))
        for count, size, seen in zip(num_blocks, block_bytes, spec.windows, strict=True):
            what = "all tokens before one" if seen is None else f"{seen} tokens at most"
            _log.info(
                "KV cache of layers that see %s: %d tokens, %d bytes", what, count * cache.block_size, count * size
            )
        return MemoryPlan(
            limit,
            spec.num_bytes,
            _bytes_of(num_blocks, block_bytes),
            shares.adapter_bytes,
            activations,
            num_host_blocks[0],
            self._copy_seconds() if all(num_host_blocks) else 0.0,
            peak_meter(self.base.device, spec.num_bytes),
            *num_blocks[1:],
            *num_host_blocks[1:],
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
        """The time of copying one block to host memory or back, the best of a few; the mean of all kinds."""
        kinds = range(self.cache.shape.num_kinds)
        copies = tuple(BlockCopy(self.cache.spare_blocks(1, 1, kind)[0][0], 0, kind) for kind in kinds)
        seconds = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            self.cache.move(BlockMoves(copies, copies))
            seconds.append(time.perf_counter() - start)
        return min(seconds) / 2 / len(copies)

    def _spare_block(self) -> int:
        return self.cache.spare_blocks(1, 1)[0][0]
