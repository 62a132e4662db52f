"""Packed weights in FP4 (e2m1), two in a byte, the lower half first, with a scale for each group of inputs.

NVFP4 has groups of 16, their scales in FP8, and one scale more of the whole layer, by which compressed-tensors divides
and modelopt multiplies. MXFP4 has groups of 32, whose scales are powers of two, stored as exponents with 127 added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.loading.float8_formats import Float8Scheme
from lora_serve.model.loading.packed_format import (
    ANY,
    FLOATS,
    Fields,
    Part,
    Scaled,
    Scheme,
    StoredLayer,
    check_fields,
    num_groups,
)
from lora_serve.model.loading.packed_weight import Scales

_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # the numbers above 0 times two, which makes them whole
_UNUSED = ("input_scale", "k_scale", "v_scale")  # of inputs and of keys and values, which are not rounded
_MODELOPT: Fields = {
    "quant_method": ("modelopt", "modelopt_fp4"),
    "quant_algo": ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
    "group_size": (None, 16),
    **dict.fromkeys(
        ("config_groups", "exclude_modules", "ignore", "kv_cache_quant_algo", "kv_cache_scheme", "producer"), ANY
    ),
}


def modelopt_schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The way in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _MODELOPT, "modelopt")
    if stored["quant_algo"] == "NVFP4":
        return [Float4Scheme("modelopt's NVFP4", "weight", 16, "weight_scale_2", *_UNUSED)]
    return [Float8Scheme(f"modelopt's {stored['quant_algo']}", None, "weight_scale", *_UNUSED)]


class Float4Scheme(Scaled):
    """Layers in FP4."""

    bits = 8  # of the whole numbers that FP4's are times two
    types = ("U8",)

    def __init__(self, words: str, numbers: str, group_size: int, whole: str | None, *unused: str) -> None:
        """`numbers`, `whole`, `unused`: last names of the numbers, of the whole layer's scale, if there is one, and of
        what is ignored.
        """
        self.words, self.numbers = words, numbers
        self._group_size, self._whole, self._unused = group_size, whole, unused

    @property
    def kind(self) -> str:
        return "fp4"

    def size(self, layer: StoredLayer) -> tuple[int, int]:
        num_outputs, num_bytes = layer.forms[self.numbers][1]
        return num_outputs, num_bytes * 2

    def parts(self, num_outputs: int, num_inputs: int, layer: StoredLayer) -> Mapping[str, Part]:
        shapes = ((num_outputs, num_groups(num_inputs, self._group_size)),)
        one = ((1,), ())
        whole = {} if self._whole is None else {self._whole: Part(FLOATS, one)}
        unused = {name: Part(FLOATS, one, is_needed=False) for name in self._unused}
        return {"weight_scale": Part(("F8_E4M3",) if whole else ("U8",), shapes), **whole, **unused}

    def scales(self, layer: StoredLayer) -> Scales:
        scales = layer.read("weight_scale")
        if self._whole is None:
            powers = torch.exp2(scales.float() - 127).masked_fill(scales == 255, torch.nan)
            return Scales(powers / 2, self._group_size)
        whole = layer.read(self._whole).float()
        whole = 1 / whole if self._whole == "weight_global_scale" else whole
        return Scales(scales.float() * whole / 2, self._group_size)

    def codes(self, layer: StoredLayer) -> Tensor:
        data = layer.read(self.numbers)
        table = torch.tensor([*_TWICE, *(-number for number in _TWICE)], dtype=torch.int8)
        return table[torch.stack((data & 15, data >> 4), -1).flatten(1).int()]
