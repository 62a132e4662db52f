"""Builds an engine: tables, scheduler and runner."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from lora_serve.adapters.loading.host_cache import HostCache
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import MemoryPlan
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.engine.adapters.residency import AdapterResidency
from lora_serve.engine.adapters.slots import SlotTable
from lora_serve.engine.batcher import Batcher, padded_length
from lora_serve.engine.blocks import BlockManager, PrefixCache
from lora_serve.engine.commands import Commands
from lora_serve.engine.constraints import Constraints
from lora_serve.engine.engine import Engine
from lora_serve.engine.execution import Execution, Runner
from lora_serve.engine.figures import Figures
from lora_serve.engine.policies import create_policy
from lora_serve.engine.policies.base import PolicyView
from lora_serve.engine.recorder import Recorder
from lora_serve.engine.scheduling.drafting import Drafting
from lora_serve.engine.scheduling.scheduler import Scheduler
from lora_serve.engine.scheduling.step_rows import MemoryGuard
from lora_serve.engine.sequence import Ends
from lora_serve.engine.step_cost import StepCost
from lora_serve.engine.swapping import Swapping, SwapSpace


def build_engine(
    runner: Runner,
    spec: ModelSpec,
    num_blocks: int,
    engine_config: EngineConfig,
    adapter_config: AdapterConfig,
    submit: Callable[[AdapterRef], None],
    clock: Callable[[], float] = time.monotonic,
    memory: MemoryPlan | None = None,
    constraints: Constraints | None = None,
) -> Engine:
    """An engine over `runner`; `submit` starts the load of an adapter, which ends with a `LoadFinished`.

    `clock`: the present time in seconds; the simulator brings its own. `memory`: how the device's memory was shared
    out; None: unknown and unlimited. `constraints`: compiles grammars; None: requests that have one are refused.
    """
    memory = memory or MemoryPlan()
    blocks = BlockManager(num_blocks, engine_config.block_size)
    eviction = (adapter_config.adapter_eviction, adapter_config.adapter_tenant_floor)
    slot_bytes = memory.adapter_bytes if adapter_config.adapter_memory is None else adapter_config.adapter_memory
    recorder = Recorder()
    residency = AdapterResidency[Any](
        SlotTable(adapter_config.max_loras, slot_bytes, *eviction),
        HostCache(adapter_config.adapter_host_memory, adapter_config.max_cpu_loras, *eviction), submit, clock, recorder,
    )  # fmt: skip
    prefix_cache = PrefixCache(
        blocks, is_enabled=engine_config.enable_prefix_caching, shares_base=engine_config.share_base_prefixes
    )
    cost = StepCost()
    view = PolicyView(
        engine_config.max_wait, engine_config.tenant_weight, cost, lambda adapter: adapter.digest in residency.slots,
        lambda adapter: residency.is_here(adapter.digest), lambda: residency.slots.num_slots, prefix_cache.num_known,
    )  # fmt: skip
    policy = create_policy(engine_config.policy, view)
    is_padded = spec.pooling is not None and not spec.pooling.is_ragged
    batcher = Batcher(engine_config.batch, cost, padded_length if is_padded else None)
    guard = MemoryGuard(memory, residency.slots)
    swapping = Swapping(SwapSpace(memory.num_host_blocks), blocks, cost, memory.block_copy_seconds)
    ends = Ends(spec.eos_token_ids, spec.max_model_len, spec.long_rope)
    scheduler = Scheduler(
        random.Random(engine_config.seed), blocks, prefix_cache, residency, policy, batcher, ends, guard, swapping,
        Drafting(engine_config.speculate, cost, ends, blocks), constraints, recorder,
    )  # fmt: skip
    execution = Execution(runner, residency, swapping, guard, constraints, clock)
    commands = Commands(execution, scheduler, residency)
    figures = Figures(scheduler, residency, blocks, guard, constraints, recorder)
    return Engine(scheduler, execution, residency, commands, figures, recorder, clock)
