"""Loads the base model and lays its pools: everything of this floor that wiring needs, in one call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.probe import MAX_PROBE_TOKENS
from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.model.base_model import BaseModel, load_model
from lora_serve.model.copy_stream import copy_stream
from lora_serve.model.exactness import check_exactness, plain_logprobs, probe_tokens
from lora_serve.model.folding import fold
from lora_serve.model.host_adapter import HostAdapter
from lora_serve.model.initialisation import undo
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.loading import LoadedModel
from lora_serve.model.lora_slots import LoraSlots
from lora_serve.model.pooling.loading import load_pooling_model
from lora_serve.model.pooling.model import PoolingModel
from lora_serve.model.pooling.plan import PoolingPlan, plan_pooling
from lora_serve.model.pooling.runner import PoolingRunner
from lora_serve.model.runner import ModelRunner

_PROBE_ROWS = 3  # see ModelRunner.probe
_CPU_SHARE, _CUDA_SHARE = 0.25, 0.85  # of the free memory, for the KV cache


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A base model that has proved exact, ready to run batches."""

    spec: ModelSpec
    runner: ModelRunner | PoolingRunner
    num_blocks: int  # KV blocks, block 0 not counted; 0 of a model that pools
    fold: Callable[[SavedAdapter], HostAdapter]  # for the loaders' threads
    undo: Callable[[SavedAdapter, str], SavedAdapter]  # for the registry's thread; see `initialisation.undo`


def build_model(model_config: ModelConfig, engine_config: EngineConfig, num_slots: int) -> ModelParts:
    """Load, wrap, prove. Raises ModelError and ConfigError before anything is served."""
    pooling = plan_pooling(model_config)
    if pooling is not None:
        return _build_pooling_model(model_config, pooling, num_slots)
    loaded = load_model(model_config)
    probe = probe_tokens(loaded.spec.vocab_size)
    expected = plain_logprobs(loaded, probe)
    num_blocks = _num_blocks(loaded, engine_config)
    size = engine_config.block_size
    num_spare = _PROBE_ROWS * -(-MAX_PROBE_TOKENS // size)
    cache = KVCache(loaded.observation.kv_shape, num_blocks + 1, size, loaded.device, num_spare)
    slots = _slots(loaded, num_slots)
    base = BaseModel(loaded, cache, slots, model_config)
    runner = ModelRunner(base, cache, slots, loaded.device)
    spec = loaded.spec
    check_exactness(runner.run, expected, probe, cache.block_size, loaded.observation.kv_shape.dtype, spec.architecture)
    return ModelParts(spec, runner, num_blocks, functools.partial(fold, base=base), functools.partial(undo, base=base))


def _build_pooling_model(config: ModelConfig, plan: PoolingPlan, num_slots: int) -> ModelParts:
    parts = load_pooling_model(config, plan)
    slots = _slots(parts.loaded, num_slots)
    base = PoolingModel(parts, slots, config)
    runner = PoolingRunner(base, slots)
    return ModelParts(
        parts.loaded.spec, runner, 0, functools.partial(fold, base=base), functools.partial(undo, base=base)
    )


def _slots(loaded: LoadedModel, num_slots: int) -> LoraSlots:
    """One more for probes."""
    return LoraSlots(loaded.spec.linears, num_slots + 1, loaded.device, copy_stream(loaded.device))


def _num_blocks(loaded: LoadedModel, config: EngineConfig) -> int:
    """How many blocks the budget pays for; at least one sequence of full length must fit."""
    block_bytes = loaded.observation.kv_shape.block_bytes(config.block_size)
    per_sequence = -(-loaded.spec.max_model_len // config.block_size)
    wanted = per_sequence * config.batch.max_num_seqs
    budget = config.kv_cache_memory if config.kv_cache_memory is not None else _free_memory(loaded.device)
    num_blocks = min(wanted, budget // block_bytes)
    if num_blocks < per_sequence:
        raise ConfigError(
            f"--kv-cache-memory: {budget} bytes hold {num_blocks * config.block_size} tokens, fewer than one "
            f"sequence of --max-model-len {loaded.spec.max_model_len}; give at least {per_sequence * block_bytes} "
            "bytes or a smaller --max-model-len"
        )
    return num_blocks


def _free_memory(device: torch.device) -> int:
    """The share of the device's free memory that the KV cache may take, bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)
