"""The seam through which a registration verifies a new adapter against the base model, which this floor does not know,
and the facts about it that the catalog notes for cards and requests.

Verification has three parts. `read_artifact` checks the files statically: format, names and shapes. `validate` checks
every value. `smoke_test` runs a forward pass that shows that the adapter changes the logits. A ValidationBudget limits
the processor time of the first two. Only paths, digests and numbers cross this seam, as the model may live in another
process. No torch.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lora_serve.adapters.catalog.entry import KEY, note_of
from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.core.adapter import AdapterRef, AdapterTraits
from lora_serve.core.errors import InvalidAdapterError, LoraServeError, on_one_line
from lora_serve.core.messages import AdapterSize, SmokeTestResult
from lora_serve.core.model_spec import ModelSpec

T = TypeVar("T")
Steps = Generator[methodcaller, Any, T]  # asks for calls of a verifier; goes on with what they return or raise
MAX_SMOKE_TEST_TOKENS = 128
_NUM_RANDOM = 8  # few, as other rows wait for this step
_NUM_TRAINED = 16  # tokens whose embeddings were trained
_NUM_NEW = 4  # tokens that the base model lacks
MAX_SHOWN = 100  # ignored settings, and characters of each, as the card is part of every listing
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_log = logging.getLogger(__name__)


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
        words = f"{type(error).__name__}: {on_one_line(error, 200)}"
        raise InvalidAdapterError([f"the model fails with it ({words})"]) from None


def check_smoke_test(result: SmokeTestResult, allow_noop: bool = False) -> None:
    """Raises InvalidAdapterError if logits are not finite or, unless `allow_noop`, if no logit changes."""
    if not math.isfinite(result.logit_change):
        raise InvalidAdapterError(["with it the base model's logits are no finite numbers"])
    if result.is_noop and not allow_noop:
        raise InvalidAdapterError(
            [f"it changes nothing: no logit moves by more than {result.logit_change:.3g} (allow_noop takes it anyway)"]
        )


def traits_of(artifact: Artifact, spec: ModelSpec) -> AdapterTraits:
    """The traits that the floors above need."""
    bound = artifact.bound
    return AdapterTraits(
        bound.is_additive,
        artifact.config.invocation_tokens,
        spec.fingerprint,
        bound.vocab_size,
        artifact.added_tokens,
        bound.num_labels,
        artifact.ends.ids,
    )


def summary_of(
    artifact: Artifact, traits: AdapterTraits, result: SmokeTestResult, base_names: Iterable[str]
) -> dict[str, Any]:
    """The summary as JSON values. `base_names`: names of the served base model."""
    config, bound = artifact.config, artifact.bound
    return {
        "peft_type": config.peft_type,
        "r": config.ranks.r,
        "lora_alpha": config.ranks.alpha,
        "use_rslora": config.ranks.use_rslora,
        "kinds": kinds_of(artifact),
        "targets": sorted({module.rpartition(".")[2] for module in bound.modules}),
        "num_modules": len(bound.modules),
        "dtypes": sorted({tensor.dtype for tensor in artifact.tensors.values()}),
        "base_model": _without_folder(config.base_model),
        "ignored_settings": [key[:MAX_SHOWN] for key in config.ignored[:MAX_SHOWN]],
        "traits": dataclasses.asdict(traits),
        "probe": {"max_logit_change": round(result.logit_change, 6), "max_logit": round(result.logit_scale, 6)},
        "warnings": [*base_warnings(config.base_model, base_names), *token_warnings(artifact)],
        **({} if artifact.template is None else {KEY: note_of(artifact.template)}),
    }


def origin_of(sent: Artifact, spec: ModelSpec) -> dict[str, Any]:
    """The card's facts about the files that were sent, for an adapter that was converted to plain LoRA."""
    return {"init": sent.config.init, "digest": sent.digest, "r": sent.config.ranks.r, "base": spec.name}


def kinds_of(artifact: Artifact) -> list[str]:
    """The kinds of change that the adapter has besides, or instead of, plain LoRA, in PEFT's words."""
    config, bound = artifact.config, artifact.bound
    kinds = {
        config.peft_type.lower(): config.peft_type != "LORA",
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "bias": config.bias != "none",
        "modules_to_save": bool(bound.parameters),
        "target_parameters": bool(config.target_parameters),
        "experts": bool(bound.deltas) and not config.target_parameters,
        "trainable_token_indices": bool(bound.tokens),
        "resized_vocabulary": bool(bound.vocab_size),
        "added_tokens": bool(artifact.added_tokens),
        "alora_invocation_tokens": bool(config.invocation_tokens),
        "embeddings": bool(bound.embeddings),
    }
    return [kind for kind, is_there in kinds.items() if is_there]


def base_warnings(base_model: str, base_names: Iterable[str]) -> list[str]:
    """A warning if the config names another base on a hub than the one that is served; its shapes agree, or it would
    be refused. A folder's name says nothing: it is the trainer's, or the operator's, own.
    """
    named, served = _last(base_model), [_last(name) for name in base_names if _is_hub_id(name)]
    if not _is_hub_id(base_model) or not served or named in served:
        return []
    return [f"Its config names the base model {named!r}, and this server serves {served[-1]!r}; their shapes agree."]


def token_warnings(artifact: Artifact) -> list[str]:
    """A warning for each special token of its chat template that is no token here: the model reads and writes it as
    ordinary text, so an answer may not end where the adapter ends it.
    """
    strange = {} if artifact.template is None else artifact.template.strange_tokens
    added = {token.content for token in artifact.added_tokens}
    return [
        f"Its chat template uses the {name} {text[:MAX_SHOWN]!r}, which is no token of the served tokenizer: it is "
        "read and written as ordinary text, and ends no answer."
        for name, text in strange.items()
        if text not in added and not (name == "eos_token" and artifact.ends.warnings)
    ] + [*artifact.ends.warnings, *([artifact.left_out] if artifact.left_out else [])]


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).is_dir()


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _without_folder(name: str) -> str:
    """The name of a base: a hub id as it is, of a private path only the last part."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "~", "file:")) else name
