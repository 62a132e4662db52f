"""Steps that are launched before the results of the step before are here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.errors import DeviceMemoryError
from lora_serve.engine.scheduling.step_rows import MemoryGuard

_log = logging.getLogger(__name__)


class Flight(Protocol):
    """A step that was launched and whose results are not here yet."""

    def collect(self) -> list[RowOutput | None]:
        """Waits for the device. Returns one output per row, in order; None: the row has to run again, by `Runner.run`,
        as its token could not be drawn without the host.
        """


class Launcher(Protocol):
    """The ability of a runner to launch a step without waiting for it."""

    def launch(self, batch: Batch, before: Any) -> Flight | None:
        """Launches a batch of plain rows behind `before`, the `Flight` (or None) whose tokens go to rows that are fed.
        None: the batch has to be `run`, once nothing is under way.

        Raises DeviceMemoryError if the device has no memory for it now.
        """


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch that the device computes."""

    batch: Batch
    start: float  # when it was begun to be composed
    flight: Flight


@dataclass(eq=False)
class Flights:
    """At most one batch is launched and not collected, but for the moment between the launch of the next and its
    landing. An error, if not of memory, ends launching for good: each batch is run and waited for from then on.
    """

    _launcher: Launcher | None  # None: the runner cannot
    _memory: MemoryGuard
    _clock: Callable[[], float]
    under_way: LaunchedBatch | None = None
    landed_at: float = 0.0  # when results came last

    @property
    def is_possible(self) -> bool:
        return self._launcher is not None

    def launch(self, batch: Batch, start: float) -> bool:
        """Launches a batch behind the one under way, in whose place it comes; False: it has to be run."""
        if self._launcher is None:
            return False
        before = None if self.under_way is None else self.under_way.flight
        try:
            flight = self._launcher.launch(batch, before)
        except DeviceMemoryError as error:
            _log.warning("%d rows are not launched ahead: %s", len(batch.rows), error)
            return False
        except Exception:
            self._give_up("a batch could not be launched")
            return False
        if flight is None:
            return False
        self.under_way = LaunchedBatch(batch, start, flight)
        return True

    def take(self) -> LaunchedBatch | None:
        """The batch under way, which the caller collects."""
        launched, self.under_way = self.under_way, None
        return launched

    def collect(self, launched: LaunchedBatch) -> list[RowOutput | None]:
        """The outputs of a batch, as of `Flight.collect`; after an error all of its rows have to run again."""
        try:
            outputs = launched.flight.collect()
        except Exception:
            self._give_up("a batch was launched and failed")
            outputs = [None] * len(launched.batch.rows)
        else:
            self._memory.ran_well()
        self.landed_at = self._clock()
        return outputs

    def abandon(self) -> None:
        """Waits for what is under way, whose results are of no use."""
        if (launched := self.take()) is not None:
            self.collect(launched)

    def _give_up(self, words: str) -> None:
        _log.exception("%s; from now on each is waited for", words)
        self._launcher = None
