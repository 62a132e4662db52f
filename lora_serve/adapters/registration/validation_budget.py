"""How long the validation of one adapter may keep a thread at work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from lora_serve.core.errors import InvalidAdapterError


class ValidationBudget:
    """Seconds of the processor that one thread may take from now on. What waits, for a disk or others, costs nothing,
    so that the verdict does not depend on how busy the machine is.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
        """To be made, and asked, on the thread that does the work."""
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds, not below zero."""
        return max(0.0, self._end - self._clock())

    def check(self) -> None:
        """Called at every tensor and after every part of a validation. Raises InvalidAdapterError."""
        if self.left <= 0:
            raise InvalidAdapterError(
                [f"its validation takes more than {self._seconds:.3g} s of the processor (--registration-seconds)"]
            )


def unlimited() -> ValidationBudget:
    """For whoever is not a stranger."""
    return ValidationBudget(math.inf)
