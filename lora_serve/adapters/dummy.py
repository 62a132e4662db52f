"""An adapter of zeros on every linear layer: warm-up rows take the ordinary way with it and change nothing."""

from __future__ import annotations

import torch

from lora_serve.adapters.checkpoint.saved import SavedAdapter, SavedLinear
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.model_spec import ModelSpec

_RANK = 8


def dummy_adapter_ref(spec: ModelSpec) -> AdapterRef:
    """Its reference; the digest is no SHA-256, so that no registered adapter can have it."""
    num_bytes = sum(4 * _RANK * (shape.in_features + shape.out_features) for shape in spec.linears.values())
    return AdapterRef("", "warm-up", 1, "warm-up", _RANK, num_bytes)


def dummy_adapter(spec: ModelSpec) -> SavedAdapter:
    """Its weights: A [rank, in] and B [rank, out] of zeros."""
    ref = dummy_adapter_ref(spec)
    linears = {
        name: SavedLinear(torch.zeros(_RANK, shape.in_features), torch.zeros(_RANK, shape.out_features), 1.0)
        for name, shape in spec.linears.items()
    }
    return SavedAdapter(ref.digest, ref.name, linears)
