"""Validation of an adapter's values: the part of a registration that needs torch, run beside the model."""

from __future__ import annotations

from collections.abc import Callable

from lora_serve.adapters.checkpoint.weights.plain_lora import Undo, convert_to_plain_lora
from lora_serve.adapters.checkpoint.weights.reading import read_weights
from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights.values import check_values
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.core.messages import AdapterSize


def convert(staged: StagedAdapter, undo: Undo) -> None:
    """See `AdapterVerifier.convert`. A no-op is allowed here, as only the converted adapter shows it."""
    check = staged.budget.check
    check_values(staged.folder, staged.artifact, allow_noop=True, check=check)
    convert_to_plain_lora(staged.folder, staged.artifact, staged.spec, undo, staged.max_rank, check)


def validate(staged: StagedAdapter, num_bytes: Callable[[SavedAdapter], int], *, allow_noop: bool) -> AdapterSize:
    """See `AdapterVerifier.validate`. `num_bytes`: of host memory, once it is ready for the base."""
    check = staged.budget.check
    check_values(staged.folder, staged.artifact, allow_noop, check)
    saved = read_weights(staged.folder, staged.artifact, max_rank=staged.max_rank, check=check)
    size = AdapterSize(saved.rank, num_bytes(saved))
    check()
    return size
