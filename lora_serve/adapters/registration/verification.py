"""The seam through which a registration verifies a new adapter against the base model, which this floor does not know.

Verification has three parts. `read_artifact` checks the files statically: format, names and shapes. `validate` checks
every value. `smoke_test` runs a forward pass that shows that the adapter changes the logits. A ValidationBudget limits
the processor time of the first two. Only paths, digests and numbers cross this seam, as the model may live in another
process. No torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.messages import AdapterSize, SmokeTestResult
from lora_serve.core.model_spec import ModelSpec


class ValidationBudget:
    """The processor time that one thread may spend on an adapter.

    Waiting for a disk or for others costs nothing, so that the verdict does not depend on how busy the machine is.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
        """Must be made and asked on the thread that does the work."""
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds
        self._thread = threading.get_ident()

    @property
    def left(self) -> float:
        """Seconds, not below zero."""
        assert threading.get_ident() == self._thread, "another thread has spent another time"
        return max(0.0, self._end - self._clock())

    def check(self) -> None:
        """Called at every tensor and after every part of a validation. Raises InvalidAdapterError."""
        if self.left <= 0:
            raise InvalidAdapterError(
                [f"its validation takes more than {self._seconds:.3g} s of the processor (--registration-seconds)"]
            )


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """An adapter in a private folder. Its files fit the base model; its values are not checked yet."""

    folder: Path
    artifact: Artifact
    spec: ModelSpec
    max_rank: int | None
    budget: ValidationBudget


class AdapterVerifier(Protocol):
    """Called on the registry's threads, several at once. Every method raises AdapterUnavailableError if the engine
    cannot be reached.
    """

    def convert(self, staged: StagedAdapter) -> None:
        """Rewrite the folder: an adapter that was trained on a changed base becomes a LoRA of the base as it is.

        Raises InvalidAdapterError, OSError.
        """

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        """Check every value and make the adapter ready for the base model. Raises InvalidAdapterError, OSError."""

    def smoke_test(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
        """Run a prompt with and without an adapter that is in the store, and compare the logits."""
