"""The step. Everything the server does to a request happens in `step`, on one thread, in this order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lora_serve.adapters.loading.loader import LoadFinished
from lora_serve.core.live import EngineView
from lora_serve.core.messages import Command, Event, StepEvent, Watch
from lora_serve.core.stats import EngineStats
from lora_serve.engine.adapters.residency import AdapterResidency
from lora_serve.engine.commands import Commands
from lora_serve.engine.constraints import GrammarCompiled
from lora_serve.engine.execution import Execution
from lora_serve.engine.figures import Figures
from lora_serve.engine.recorder import Recorder
from lora_serve.engine.scheduling.scheduler import Scheduler


@dataclass(eq=False)
class Engine:
    """Tables, scheduler and runner together. Not thread-safe: `loop.py` is its only caller."""

    scheduler: Scheduler
    execution: Execution
    residency: AdapterResidency[Any]
    commands: Commands
    figures: Figures
    recorder: Recorder
    _clock: Callable[[], float] = time.monotonic

    @property
    def is_busy(self) -> bool:
        """True if sequences run; may be asked from any thread."""
        return bool(self.scheduler.running)

    def step(self) -> tuple[bool, list[StepEvent]]:
        """One step: expire, schedule, load slots, run, update. Returns whether anything ran, and its events."""
        start = self._clock()
        events: list[StepEvent] = [*self.scheduler.expire(start)]
        batch, started = self.scheduler.schedule(start)
        events += started
        self._load_slots()
        if batch is None:
            return False, events
        self.execution.start_masks(batch)
        seconds_moved = self.execution.move(batch.moves)
        outputs = self.execution.run(batch)
        now = self._clock()
        is_warm_up = all(sequence.request.is_warm_up for sequence in self.scheduler.running)
        ran = self.scheduler.by_row() if self.recorder.is_on and not is_warm_up else None
        events += self.scheduler.update(outputs, batch, now)
        if ran is not None:
            self.recorder.step(self.figures.num_steps + 1, batch, ran, events, start, now)
        self._load_slots()  # a command may have waited for a row that ended
        seconds = now - start - seconds_moved
        self.scheduler.observe(batch.load, seconds)
        if not is_warm_up:
            self.figures.count_step(batch, seconds)
        return True, events

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

    def stats(self) -> EngineStats:
        return self.figures.stats()

    def look(self, asked: Watch) -> EngineView:
        """The engine at work; from now on it is recorded for some seconds."""
        return self.figures.look(asked, self._clock())

    def _load_slots(self) -> None:
        """Fills slots for the scheduled rows and for commands, which are answered once that is done."""
        self.commands.execute()
        self.commands.answer(self.execution.load_slots())
