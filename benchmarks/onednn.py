"""oneDNN's prepacked weights, through the operators that torch's own compiler emits for frozen models.

They have no public name; this file is the only one that knows theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops: Any = torch.ops.mkldnn
_PACK_ROWS = 16  # the batch size that oneDNN chooses its layout for; measured best over 1 .. 512 rows


def can_prepack(weight: Tensor) -> bool:
    """True if oneDNN multiplies this type natively here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _ops._is_mkldnn_bf16_supported())  # noqa: SLF001


def prepack(weight: Tensor) -> Tensor:
    """weight [out, in] in oneDNN's own layout: opaque, for `linear` only."""
    packed: Tensor = _ops._reorder_linear_weight(weight, _PACK_ROWS)  # noqa: SLF001
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] W^T + bias -> [..., out]."""
    y: Tensor = _ops._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return y
