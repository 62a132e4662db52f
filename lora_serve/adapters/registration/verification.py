"""The seam through which a registration tries an adapter on the base model, which this floor does not know.

Only words cross it, as the model may live in another process: a folder, a digest, numbers. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.adapters.registration.validation_budget import ValidationBudget, unlimited
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.messages import AdapterSize, SmokeTestResult
from lora_serve.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """An adapter in a private folder. Its files fit the base model; nobody has looked at its values yet."""

    folder: Path
    artifact: Artifact
    spec: ModelSpec
    max_rank: int | None
    budget: ValidationBudget = field(default_factory=unlimited)


class AdapterVerifier(Protocol):
    """Called on the registry's threads, several at once. Every method raises AdapterUnavailableError if the engine is
    away.
    """

    def convert(self, staged: StagedAdapter) -> None:
        """Rewrite the folder: what was trained from a start of its own as a LoRA of the base as it is.

        Raises InvalidAdapterError, OSError.
        """

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        """Check every value, and make it ready for the base model. Raises InvalidAdapterError, OSError."""

    def smoke_test(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
        """What an adapter that is in the store changes in the answers. Raises AdapterUnavailableError."""
