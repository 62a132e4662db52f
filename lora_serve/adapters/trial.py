"""The seam through which a registration tries an adapter on the base model, which this floor does not know.

Only words cross it, as the model may live in another process: a folder, a digest, numbers. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.adapters.examination_budget import ExaminationBudget, unlimited
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.messages import ProbeResult
from lora_serve.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """An adapter in a private folder. Its files fit the base model; nobody has looked at its values yet."""

    folder: Path
    artifact: Artifact
    spec: ModelSpec
    max_rank: int | None
    budget: ExaminationBudget = field(default_factory=unlimited)


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """An adapter as it will be served."""

    rank: int  # the largest of any module
    num_bytes: int  # of host memory


class Trial(Protocol):
    """Called on the registry's threads, several at once. Every method raises AdapterUnavailableError if the engine is
    away.
    """

    def make_plain(self, candidate: Candidate) -> None:
        """Rewrite the folder: what was trained from a start of its own as a LoRA of the base as it is.

        Raises InvalidAdapterError, OSError.
        """

    def weigh(self, candidate: Candidate, *, allow_noop: bool) -> AdapterSize:
        """Check every value, and make it ready for the base model. Raises InvalidAdapterError, OSError."""

    def probe(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> ProbeResult:
        """What an adapter that is in the store changes in the answers. Raises AdapterUnavailableError."""
