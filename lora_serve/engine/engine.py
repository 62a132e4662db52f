"""The step: all that the server does to a request happens in `Engine.step`, on one thread; and the engine, built."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, MemoryPlan, RowOutput
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.constraints import Constraints, GrammarCompiled
from lora_serve.core.errors import LoraServeError
from lora_serve.core.live import EngineView
from lora_serve.core.messages import Command, Event, StepEvent, Watch
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.stats import EngineStats, GraphStats
from lora_serve.engine.batcher import Batcher, padded_length
from lora_serve.engine.blocks import BlockManager, BlockTables
from lora_serve.engine.commands import Commands
from lora_serve.engine.execution import Execution, Runner
from lora_serve.engine.figures import EngineFigures
from lora_serve.engine.flights import Flights, LaunchedBatch, Launcher
from lora_serve.engine.host_cache import HostCache
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.policies import create_policy
from lora_serve.engine.policies.base import PolicyView
from lora_serve.engine.prefix_cache import PrefixCache
from lora_serve.engine.recorder import Recorder
from lora_serve.engine.residency import AdapterResidency
from lora_serve.engine.scheduling.ahead import AheadScheduler
from lora_serve.engine.scheduling.drafting import Drafting
from lora_serve.engine.scheduling.scheduler import Scheduler
from lora_serve.engine.scheduling.step_rows import MemoryGuard
from lora_serve.engine.sequence import Ends
from lora_serve.engine.slots import SlotTable
from lora_serve.engine.step_cost import StepCost
from lora_serve.engine.swapping import Swapping, SwapSpace


@dataclass(eq=False)
class Engine:
    """Tables, scheduler and runner together. Not thread-safe: `loop.py` is its only caller."""

    scheduler: Scheduler
    ahead: AheadScheduler
    execution: Execution
    residency: AdapterResidency[Any]
    commands: Commands
    figures: EngineFigures
    recorder: Recorder
    _clock: Callable[[], float] = time.monotonic
    _events: list[StepEvent] = field(default_factory=list)  # that no step has returned yet

    @property
    def is_busy(self) -> bool:
        """True if sequences run; may be asked from any thread."""
        return bool(self.scheduler.running)

    def step(self) -> tuple[bool, list[StepEvent]]:
        """One step: expire, schedule, load slots, run, update. Returns whether anything ran, and the events that there
        are by then. A batch that can be launched is taken in at the next step, behind the launch of that if possible.
        """
        start = self._clock()
        self._events += self.scheduler.expire(start)
        if self._launch_ahead(start):
            return True, self.take_events()
        if self._land():
            return True, self.take_events()
        batch, started = self.scheduler.schedule(start)
        self._events += started
        self._load_slots()
        if batch is None:
            return False, self.take_events()
        self.execution.start_masks(batch)
        seconds_moved = self.execution.move(batch.moves)
        flights = self.execution.flights
        if not (flights.is_possible and self.ahead.may_launch(batch) and flights.launch(batch, start + seconds_moved)):
            self._update(batch, self.execution.run(batch), start, seconds_moved)
        return True, self.take_events()

    def _launch_ahead(self, start: float) -> bool:
        """Launches the step after the one that is under way, and only then takes in the results of that. False: there
        is none, or its results have to be here first.
        """
        flights, launched = self.execution.flights, self.execution.flights.under_way
        if launched is None or not flights.is_possible:
            return False
        if (batch := self.ahead.compose(launched.batch, start)) is None:
            return False
        if not flights.launch(batch, start):
            self.ahead.drop(batch)
            return False
        self._take_in(launched)
        return True

    def _land(self) -> bool:
        """Takes in the results of what is under way; False: nothing is."""
        launched = self.execution.flights.take()
        if launched is not None:
            self._take_in(launched)
        return launched is not None

    def _take_in(self, launched: LaunchedBatch) -> None:
        start = max(launched.start, self.execution.flights.landed_at)
        outputs = self.execution.flights.collect(launched)
        batch, wanted = self.ahead.wanted(launched.batch, outputs)
        if batch is not None:
            self._update(batch, wanted, start)

    def _update(self, batch: Batch, outputs: list[RowOutput], start: float, seconds_moved: float = 0.0) -> None:
        """Takes in the results of a batch, and learns from the time that it took."""
        now = self._clock()
        is_warm_up = all(sequence.request.is_warm_up for sequence in self.scheduler.running)
        ran = self.scheduler.running_by_id() if self.recorder.is_on and not is_warm_up else None
        events: list[StepEvent] = [*self.scheduler.update(outputs, batch, now)]
        self._events += events
        if ran is not None:
            self.recorder.step(self.figures.num_steps + 1, batch, ran, events, start, now)
        seconds = now - start - seconds_moved
        self.scheduler.observe(batch.load, seconds)
        if not is_warm_up:
            self.figures.count_step(batch, seconds)
        self._load_slots()  # a command may have waited for a row that ended

    def take_events(self) -> list[StepEvent]:
        """The events that no step has returned yet."""
        events, self._events = self._events, []
        return events

    def load_finished(self, message: LoadFinished[Any]) -> list[Event]:
        """Takes in the end of a load; requests of an adapter that cannot be had end here."""
        error = self.residency.load_finished(message)
        if error is None:
            self.scheduler.adapter_arrived(message.digest, self._clock())
            return []
        self.commands.fail_adapter(message.digest, error)
        return self.scheduler.fail_adapter(message.digest, error, self._clock())

    def grammar_compiled(self, message: GrammarCompiled) -> list[Event]:
        """Takes in the end of a compilation; a request whose grammar cannot be compiled ends here."""
        return self.scheduler.grammar_compiled(message, self._clock())

    def command(self, command: Command) -> None:
        """Takes in a command; its reply is among `commands.take_replies` once it is done."""
        self.commands.add(command)
        self._load_slots()

    def fail_all(self, error: LoraServeError) -> list[StepEvent]:
        """Ends every request, once nothing is under way."""
        self.execution.flights.abandon()
        return [*self.take_events(), *self.scheduler.fail_all(error)]

    def stats(self) -> EngineStats:
        return self.figures.stats()

    def view(self, asked: Watch) -> EngineView:
        """The engine at work; from now on it is recorded for some seconds."""
        return self.figures.view(asked, self._clock())

    def _load_slots(self) -> None:
        """Fills slots for the scheduled rows and for commands, which are answered once that is done. Slots change while
        nothing is under way that could read them.
        """
        if self.execution.flights.under_way is not None:
            if self.commands.is_idle and not self.residency.has_changes:
                return
            self._land()
        self.commands.execute()
        self.commands.answer(self.execution.load_slots())


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
    graphs: Callable[[], GraphStats] = GraphStats,
    launcher: Launcher | None = None,
) -> Engine:
    """An engine over `runner`; `submit` starts the load of an adapter, which ends with a `LoadFinished`.

    `clock`: the present time in seconds; the simulator brings its own. `memory`: how the device's memory was shared
    out; None: unknown and unlimited. `constraints`: compiles grammars; None: requests that have one are refused.
    `graphs`: what the runner counts of its captured steps. `launcher`: the runner, if it can launch steps ahead.
    """
    memory = memory or MemoryPlan()
    counts = num_blocks, memory.num_windowed_blocks
    blocks = BlockTables(
        *(
            BlockManager(count, engine_config.block_size, seen)
            for count, seen in zip(counts, spec.windows, strict=False)
        )
    )
    eviction = (adapter_config.adapter_eviction, adapter_config.adapter_tenant_floor)
    slot_bytes = memory.adapter_bytes if adapter_config.adapter_memory is None else adapter_config.adapter_memory
    recorder = Recorder()
    residency = AdapterResidency[Any](
        SlotTable(adapter_config.max_loras, slot_bytes, *eviction),
        HostCache(adapter_config.adapter_host_memory, adapter_config.max_cpu_loras, *eviction), submit, clock, recorder,
    )  # fmt: skip
    prefix_cache = PrefixCache(
        blocks, is_enabled=engine_config.enable_prefix_caching, shares_base=engine_config.share_base_prefixes,
        step_tokens=engine_config.batch.max_num_batched_tokens,
    )  # fmt: skip
    cost = StepCost(spec.device, spec.captured_tokens)
    view = PolicyView(
        engine_config.max_wait, engine_config.tenant_weight, cost, lambda adapter: adapter.digest in residency.slots,
        lambda adapter: residency.is_here(adapter.digest), lambda: residency.slots.num_slots, prefix_cache.num_known,
    )  # fmt: skip
    policy = create_policy(engine_config.policy, view)
    is_padded = spec.pooling is not None and not spec.pooling.is_ragged
    batcher = Batcher(engine_config.batch, cost, padded_length if is_padded else None)
    guard = MemoryGuard(memory, residency.slots)
    host_counts = (memory.num_host_blocks, memory.num_windowed_host_blocks)[: len(spec.windows)]
    spaces = [SwapSpace(count, kind) for kind, count in enumerate(host_counts)]
    swapping = Swapping(spaces, blocks, cost, memory.block_copy_seconds)
    ends = Ends(spec.eos_token_ids, spec.max_model_len, spec.long_rope)
    scheduler = Scheduler(
        random.Random(engine_config.seed), blocks, prefix_cache, residency, policy, batcher, ends, guard, swapping,
        Drafting(engine_config.speculate, cost, blocks), constraints, recorder,
    )  # fmt: skip
    ahead = AheadScheduler(scheduler, blocks, guard, policy)
    execution = Execution(runner, residency, swapping, guard, constraints, clock, Flights(launcher, guard, clock))
    commands = Commands(execution, scheduler, residency)
    figures = EngineFigures(scheduler, residency, blocks, guard, constraints, recorder, graphs)
    return Engine(scheduler, ahead, execution, residency, commands, figures, recorder, clock)
