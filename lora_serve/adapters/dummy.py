"""An adapter of zeros on every linear layer, for warm-up requests.

Its tensors are in `checkpoint/weights/saved.py`: no torch here.
"""

from __future__ import annotations

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.model_spec import ModelSpec

DUMMY_RANK, DUMMY_DIGEST = 8, "warm-up"  # the digest is no SHA-256, so no registered adapter can have it


def dummy_adapter_ref(spec: ModelSpec) -> AdapterRef:
    """The reference of the dummy adapter."""
    num_bytes = sum(4 * DUMMY_RANK * (shape.in_features + shape.out_features) for shape in spec.linears.values())
    return AdapterRef("", "warm-up", 1, DUMMY_DIGEST, DUMMY_RANK, num_bytes)
