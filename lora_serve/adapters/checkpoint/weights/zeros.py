"""The tensors of the adapter of zeros (`adapters/dummy.py`)."""

from __future__ import annotations

import torch

from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter, SavedLinear
from lora_serve.adapters.dummy import DUMMY_RANK, dummy_adapter_ref
from lora_serve.core.model_spec import ModelSpec


def dummy_adapter(spec: ModelSpec) -> SavedAdapter:
    """Its weights: A [rank, in] and B [rank, out] of zeros."""
    ref = dummy_adapter_ref(spec)
    linears = {
        name: SavedLinear(torch.zeros(DUMMY_RANK, shape.in_features), torch.zeros(DUMMY_RANK, shape.out_features), 1.0)
        for name, shape in spec.linears.items()
    }
    return SavedAdapter(ref.digest, ref.name, linears)
