"""Validation of an adapter's values: the part of a registration that needs torch, run beside the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.adapters.checkpoint.bound import BoundAdapter
from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import (
    Undo,
    WeightsFile,
    bits_of,
    convert_to_plain_lora,
    open_weights,
    read_weights,
)
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.messages import AdapterSize

_ALL_BUT_SIGN = {2: 0x7FFF, 4: 0x7FFFFFFF}  # by bytes
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


def check_values(
    folder: Path, artifact: Artifact, allow_noop: bool = False, check: Callable[[], None] = lambda: None
) -> None:
    """Refuses values that are not finite, copies that differ and, unless `allow_noop`, deltas that are all zero.

    The effect on the model's answers is the smoke test's part. `check`: called at every tensor. Raises
    InvalidAdapterError naming the tensors, OSError, what `check` raises.
    """
    file = open_weights(folder, check)
    reasons = [f"tensor {name!r} holds NaN or infinity" for name in artifact.tensors if not _is_finite(file, name)]
    reasons += [
        f"tensors {first!r} and {second!r} are one and the same to PEFT, but they differ"
        for first, second in artifact.bound.copies
        if not torch.equal(file.get_tensor(first), file.get_tensor(second))
    ]
    if not reasons and not allow_noop and _is_noop(file, artifact.bound):
        reasons.append("it changes nothing: in every module lora_A, lora_B or the scale is zero")
    if reasons:
        raise InvalidAdapterError(reasons)


def _is_finite(file: WeightsFile, name: str) -> bool:
    tensor = file.get_tensor(name)
    if tensor.numel() == 0:
        return True
    mask = _EXPONENTS[tensor.dtype]
    return bool((bits_of(tensor) & mask).max() < mask)  # NaN and infinity have every bit of the exponent set


def _is_noop(file: WeightsFile, bound: BoundAdapter) -> bool:
    """True if all low-rank deltas are zero; False for adapters with anything else, which the smoke test judges."""
    if (
        not bound.is_additive
        or bound.conversions is not None
        or any(linear.lora_bias_name for linear in bound.linears.values())
    ):
        return False
    factors = [(linear.a_name, linear.b_name, linear.scale) for linear in bound.linears.values()]
    factors += [(table.a_name, table.b_name, table.scale) for table in bound.embeddings.values()]
    return all(
        scale == 0.0 or any(name is None or is_zero(file.get_tensor(name)) for name in (a, b))
        for a, b, scale in factors
    )


def is_zero(tensor: Tensor) -> bool:
    """True if every value is zero, of either sign."""
    return not (bits_of(tensor) & _ALL_BUT_SIGN[tensor.itemsize]).any()


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
