"""Puts the model's parts together: loading, slots, KV cache, memory, runner; and proves the result exact."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import Undo
from lora_serve.adapters.registration.verification import MAX_SMOKE_TEST_TOKENS
from lora_serve.core.batch import Batch, MemoryPlan, RowOutput
from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import LoraServeError, ModelError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.stats import GraphStats
from lora_serve.model.base_model import BaseModel, load_model
from lora_serve.model.exactness import check_exactness, check_small_copy, plain_logprobs, probe_tokens
from lora_serve.model.expert_choices import ExpertChoices
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.kv_format import FORMATS, PLAIN
from lora_serve.model.loading.frozen_model import LoadedModel
from lora_serve.model.loading.number_type import FLOAT8
from lora_serve.model.loading.observation import first_line
from lora_serve.model.lora.folding import fold, undo
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.model.lora.lora_slots import LoraSlots, copy_stream
from lora_serve.model.memory_setup import MemorySetup
from lora_serve.model.pooling.loading import load_pooling_model
from lora_serve.model.pooling.plan import PoolingPlan, plan_pooling
from lora_serve.model.pooling.runner import PoolingModel, PoolingRunner
from lora_serve.model.runner.graphs import MAX_LONG_TOKENS, StepGraphs, captured_load
from lora_serve.model.runner.model_runner import ModelRunner
from lora_serve.model.system.process import keep_freed_memory, return_freed_memory
from lora_serve.model.system.threads import TeamWaits, one_core, team_waits

_log = logging.getLogger(__name__)
_SMOKE_TEST_ROWS = 3  # see ModelRunner.smoke_test
_FIRST_RANK = 64  # on a GPU; an adapter of a greater one has all graphs captured anew
# Bytes of weights below which thousands of products of a few rows are faster on one core beside the imports that run
# meanwhile: on two cores that others kept busy a build took 29 s of processor time instead of 2.
_SMALL_MODEL = 2**30
Check = Callable[..., float]  # `check_exactness` with all but `run` and `dtype`


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A base model that has proved exact, ready to run batches."""

    spec: ModelSpec
    runner: ModelRunner | PoolingRunner
    num_blocks: int  # KV blocks, block 0 not counted; 0 of a model that pools
    fold: Callable[[SavedAdapter], HostAdapter]  # for the loaders' threads
    undo: Undo  # for the registry's threads; see `folding.undo`
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    graphs: Callable[[], GraphStats] = GraphStats  # what was counted so far
    launcher: ModelRunner | None = None  # the runner, if it can launch steps ahead


def build_model(
    model_config: ModelConfig, engine_config: EngineConfig, num_slots: int, adapter_bytes: int | None = None
) -> ModelParts:
    """Loads, wraps, measures and checks the model. Raises ModelError and ConfigError before anything is served.

    `adapter_bytes`: the most bytes of device slots; None: as many as `num_slots` usual adapters need, where memory is
    bounded.
    """
    try:
        pooling = plan_pooling(model_config)
        if pooling is not None:
            return _build_pooling_model(model_config, pooling, num_slots)
        loaded = load_model(model_config)
        is_small = loaded.device.type == "cpu" and loaded.spec.num_bytes < _SMALL_MODEL
        waits = team_waits(loaded.device)
        with one_core() if is_small else nullcontext():
            return _build_generating_model(loaded, model_config, engine_config, num_slots, adapter_bytes, waits)
    except LoraServeError:
        raise
    except Exception as error:  # whatever the code of a model raises
        words = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"--model {model_config.model}: the model cannot be served: {words}") from error


def _build_generating_model(
    loaded: LoadedModel,
    model_config: ModelConfig,
    engine_config: EngineConfig,
    num_slots: int,
    adapter_bytes: int | None,
    waits: TeamWaits | None,
) -> ModelParts:
    probe = probe_tokens(loaded.spec.vocab_size)
    choices = ExpertChoices(loaded.module)
    with choices.noted(probe):
        expected = plain_logprobs(loaded, probe)
    coarsest = FLOAT8 if FLOAT8 in {p.dtype for p in loaded.module.parameters()} else loaded.observation.kv_shape.dtype
    spec, size = loaded.spec, engine_config.block_size
    cache = KVCache(
        loaded.observation.kv_shape, 1, size, loaded.device, _SMOKE_TEST_ROWS * -(-MAX_SMOKE_TEST_TOKENS // size)
    )
    slots = _slots(loaded, num_slots, model_config)
    base = BaseModel(loaded, cache, slots, model_config)
    return_freed_memory()  # the weights as they were loaded, of which `base` has laid out its own
    runner = ModelRunner(base, cache, slots, loaded.device)
    check = functools.partial(
        check_exactness, expected=expected, probe=probe, block_size=cache.block_size,
        architecture=spec.architecture, spec=spec,
    )  # fmt: skip
    prove = functools.partial(_prove, check, runner.run, choices, architecture=spec.architecture)
    form = FORMATS[engine_config.kv_cache_dtype]
    if form is not PLAIN:  # kernels have been chosen, and are proved, on numbers that nothing has rounded
        cache.resize(1 + len(probe) * -(-max(map(len, probe)) // size))
        prove(dtype=coarsest)
        cache.store_as(form)
    captures = base.device.type == "cuda" and model_config.cuda_graphs and base.kernel.reads_device_tokens
    max_rows = engine_config.batch.max_num_seqs
    captured = captured_load(max_rows, spec.max_model_len, size) if captures else None
    memory = MemorySetup(base, runner, cache, slots, engine_config, captured).run(num_slots, adapter_bytes)
    try:
        worst = prove(dtype=coarsest if form is PLAIN else FLOAT8)
    except ModelError as error:
        if form is PLAIN:
            raise
        raise ModelError(f"--kv-cache-dtype {form.name}: this model does not bear it: {error}") from error
    if form is not PLAIN:
        _log.info("KV cache in %s: log-probabilities of a probe differ by up to %.2g", form.name, worst)
    check_small_copy(model_config)
    graphs = StepGraphs(base, cache, slots, max_rows) if captures else None
    if graphs is not None and model_config.warmup != "off":
        graphs.capture_all(spec.max_model_len)
    keep_freed_memory()
    served = ModelRunner(base, cache, slots, loaded.device, graphs, waits)
    return ModelParts(
        replace(spec, captured_tokens=MAX_LONG_TOKENS if graphs is not None and base.reads_tiles else 0),
        served,
        cache.num_blocks - 1,
        functools.partial(fold, base=base),
        functools.partial(undo, base=base),
        memory,
        GraphStats if graphs is None else graphs.stats,
        served if graphs is not None and model_config.launch_ahead else None,
    )


def _prove(
    check: Check, run: Callable[[Batch], list[RowOutput]], choices: ExpertChoices, dtype: torch.dtype, architecture: str
) -> float:
    """The largest difference that `check` finds. Raises ModelError."""
    try:
        return check(run, dtype=dtype)
    except ModelError as error:
        if dtype == torch.float32 or not choices.are_known:
            raise
        _log.info("%s; compared at the experts that the model itself chose", error)
        worst = check(choices.given(run), dtype=dtype)
        choices.check_alike(architecture)
        return worst


def _build_pooling_model(config: ModelConfig, plan: PoolingPlan, num_slots: int) -> ModelParts:
    parts = load_pooling_model(config, plan)
    slots = _slots(parts.loaded, num_slots, config)
    base = PoolingModel(parts, slots, config)
    runner = PoolingRunner(base, slots)
    keep_freed_memory()
    return ModelParts(
        parts.loaded.spec, runner, 0, functools.partial(fold, base=base), functools.partial(undo, base=base)
    )


def _slots(loaded: LoadedModel, num_slots: int, config: ModelConfig) -> LoraSlots:
    """The slots of adapters and one for smoke tests."""
    first_rank = _FIRST_RANK if loaded.device.type == "cuda" else 0
    return LoraSlots(
        loaded.spec.linears, num_slots + 1, loaded.device, copy_stream(loaded.device), first_rank,
        config.lora_target_modules,
    )  # fmt: skip
