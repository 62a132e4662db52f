"""The seam through which a registration verifies a new adapter against the base model, which this floor does not know.

Verification has three parts. `read_artifact` checks the files statically: format, names and shapes. `validate` checks
every value. `smoke_test` runs a forward pass that shows that the adapter changes the logits. A ValidationBudget limits
the processor time of the first two. Only paths, digests and numbers cross this seam, as the model may live in another
process. No torch.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidAdapterError, LoraServeError
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


_log = logging.getLogger(__name__)
MAX_SMOKE_TEST_TOKENS = 128
_NUM_RANDOM = 8  # few, as other rows wait for this step
_NUM_TRAINED = 16  # tokens whose embeddings were trained
_NUM_NEW = 4  # tokens that the base model lacks


def smoke_test_prompt(config: PeftConfig, spec: ModelSpec, vocab_size: int = 0) -> tuple[int, ...]:
    """Arbitrary tokens, the same for every adapter, and those that this one needs to act.

    `vocab_size`: the adapter's own; 0: the base's.
    """
    size = vocab_size or spec.vocab_size
    limit = min(MAX_SMOKE_TEST_TOKENS, spec.max_model_len)
    numbers = random.Random(0)
    tokens = [numbers.randrange(spec.vocab_size) % size for _ in range(_NUM_RANDOM)]
    trained = [token for _, ids in config.trained_tokens for token in ids[:_NUM_TRAINED]]
    new = range(spec.vocab_size, min(size, spec.vocab_size + _NUM_NEW))
    needed = [*trained, *new, *config.invocation_tokens]
    return tuple([*needed, *tokens][:limit] if len(needed) >= limit else [*tokens[: limit - len(needed)], *needed])


@contextmanager
def refusal_of_errors(label: str) -> Iterator[None]:
    """Raises InvalidAdapterError for what a model's own code raises inside the block, a trial alone."""
    try:
        yield
    except LoraServeError:
        raise
    except Exception as error:
        _log.exception("%s could not be tried", label)
        words = " ".join(str(error).split())[:200]
        raise InvalidAdapterError([f"the model fails with it ({type(error).__name__}: {words})"]) from None


def check_smoke_test(result: SmokeTestResult, allow_noop: bool = False) -> None:
    """Raises InvalidAdapterError if logits are not finite or, unless `allow_noop`, if no logit changes."""
    if not math.isfinite(result.logit_change):
        raise InvalidAdapterError(["with it the base model's logits are no finite numbers"])
    if result.is_noop and not allow_noop:
        raise InvalidAdapterError(
            [f"it changes nothing: no logit moves by more than {result.logit_change:.3g} (allow_noop takes it anyway)"]
        )
