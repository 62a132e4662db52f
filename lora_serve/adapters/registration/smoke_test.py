"""The smoke test of a new adapter: one forward pass must show that it changes the base model's logits."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.core.errors import InvalidAdapterError, LoraServeError
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.model_spec import ModelSpec

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
