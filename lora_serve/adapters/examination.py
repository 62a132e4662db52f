"""What a registration must know of an adapter's values: the part of it that needs torch, where the model is."""

from __future__ import annotations

from collections.abc import Callable

from lora_serve.adapters.checkpoint.weights.plain_lora import Undo, make_plain
from lora_serve.adapters.checkpoint.weights.reading import read_weights
from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights.values import check_values
from lora_serve.adapters.trial import AdapterSize, Candidate


def undo_start(candidate: Candidate, undo: Undo) -> None:
    """See `Trial.make_plain`. Whether it is a no-op shows after the conversion."""
    check = candidate.budget.check
    check_values(candidate.folder, candidate.artifact, allow_noop=True, check=check)
    make_plain(candidate.folder, candidate.artifact, candidate.spec, undo, candidate.max_rank, check)


def weigh(candidate: Candidate, num_bytes: Callable[[SavedAdapter], int], *, allow_noop: bool) -> AdapterSize:
    """See `Trial.weigh`. `num_bytes`: of host memory that the adapter takes once it is ready for the base."""
    check = candidate.budget.check
    check_values(candidate.folder, candidate.artifact, allow_noop, check)
    saved = read_weights(candidate.folder, candidate.artifact, max_rank=candidate.max_rank, check=check)
    size = AdapterSize(saved.rank, num_bytes(saved))
    check()
    return size
