"""Packed weights in FP8 (e4m3), with scales by output, by block or one in all; and the format `quant_method: fp8`.

That is DeepSeek's, with `weight_scale_inv` for blocks of `weight_block_size` outputs and inputs, and the static one of
vLLM's tools, with a `weight_scale` and an `input_scale` a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.loading import float8
from lora_serve.model.loading.kept_linear import Keep
from lora_serve.model.loading.packed_format import (
    ANY,
    FLOATS,
    WHOLE,
    Fields,
    Part,
    Scaled,
    Scheme,
    StoredLayer,
    check_fields,
)
from lora_serve.model.loading.packed_weight import Scales

_POWERS = "F8_E8M0"  # scales that are powers of two, in a byte
_FIELDS: Fields = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic", "static"),
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float", "ue8m0"),  # also the latter are mostly stored as floats
    "weight_block_size": (None, [WHOLE, WHOLE]),
    **dict.fromkeys(("modules_to_not_convert", "ignored_layers", "ignored_modules"), ANY),
}


def schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The ways in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _FIELDS, "fp8")
    block = stored.get("weight_block_size")
    inputs = ("input_scale", "activation_scale")
    names = ("weight_scale_inv",) if block else ("weight_scale", "weight_scale_inv")
    return [Float8Scheme("fp8", block, name, *inputs) for name in names]


def fbgemm_schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The way in which layers are packed: with a scale for each output. Raises ValueError."""
    fields = {"quant_method": ("fbgemm_fp8",), **dict.fromkeys(("activation_scale_ub", "modules_to_not_convert"), ANY)}
    check_fields("quantization_config", stored, fields, "fbgemm_fp8")
    return [Float8Scheme("fbgemm_fp8", None, "weight_scale", "input_scale", rounds_tokens=True)]


class Float8Scheme(Scaled):
    """Layers in FP8."""

    bits = 8
    numbers = "weight"
    types = ("F8_E4M3",)

    def __init__(
        self, words: str, block: Sequence[int] | None, scale: str, *inputs: str, rounds_tokens: bool = False
    ) -> None:
        """`block`: outputs and inputs of one scale. `scale`, `inputs`: the last names of the scales of weights and of
        inputs, which are ignored. `rounds_tokens`: inputs are rounded to FP8 by a scale for each token.
        """
        self.words = words
        self._block, self._scale, self._inputs, self._rounds_tokens = block, scale, inputs, rounds_tokens

    def parts(self, num_outputs: int, num_inputs: int, layer: StoredLayer) -> Mapping[str, Part]:
        shapes: tuple[tuple[int, ...], ...] = ((num_outputs, 1), (num_outputs,), (1, 1), (1,), ())
        if self._block:
            shapes = ((math.ceil(num_outputs / self._block[0]), math.ceil(num_inputs / self._block[1])),)
        return {
            self._scale: Part((*FLOATS, _POWERS), shapes),
            **{name: Part(FLOATS, ((1,), ()), is_needed=False) for name in self._inputs},
        }

    def scales(self, layer: StoredLayer) -> Scales:
        num_outputs, num_inputs = self.size(layer)
        scales = layer.read(self._scale).float()
        if self._block:
            scales = scales.repeat_interleave(self._block[0], 0)[:num_outputs]
            return Scales(scales, self._block[1])
        return Scales(scales.reshape(-1, 1).expand(num_outputs, 1), num_inputs)

    def codes(self, layer: StoredLayer) -> Tensor:
        codes = layer.read("weight")
        if bool(codes.isnan().any()):
            raise ValueError("weight has numbers that are none")
        return codes

    def kept(self, like: nn.Linear, device: torch.device, dtype: torch.dtype) -> Keep | None:
        if self._rounds_tokens and float8.can_multiply(like, device):
            return lambda linear, weight: float8.Float8Linear(linear, weight.codes, weight.beside.scales)
        return super().kept(like, device, dtype)
