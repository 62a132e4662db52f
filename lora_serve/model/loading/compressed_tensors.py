"""Packed weights of compressed-tensors: integers in words or bytes, and FP8; groups of layers may differ in kind.

pack-quantized has `weight_packed` [out, in * bits / 32] int32 and `weight_shape`, two numbers; int-quantized `weight`
[out, in] int8; float-quantized `weight` [out, in] float8_e4m3fn; of FP4 see `float4_formats`. All have `weight_scale`,
asymmetric integers too `weight_zero_point`, and `weight_g_idx` [in] names the group of each input where their order was
changed (`actorder`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lora_serve.model.loading.float4_formats import Float4Scheme
from lora_serve.model.loading.float8_formats import Float8Scheme
from lora_serve.model.loading.packed_format import (
    ANY,
    FLOATS,
    NOTHING,
    WHOLE,
    Fields,
    Kind,
    Part,
    Scaled,
    Scheme,
    StoredLayer,
    check_fields,
    num_groups,
)
from lora_serve.model.loading.packed_weight import Scales, unpacked

_WORDS = "compressed-tensors"
_FREE: Fields = dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), ANY)
_DENSE = Kind("that of dense weights", lambda found: isinstance(found, Mapping) and found.get("format") == "dense")
_OF_CHECKPOINT: Fields = {
    "quant_method": (_WORDS,),
    "format": (
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "mixed-precision",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
    ),
    "sparsity_config": (*NOTHING, _DENSE),
    **dict.fromkeys(("config_groups", "ignore", "quantization_status", "global_compression_ratio", "version"), ANY),
}
_INTEGERS: Fields = {
    **_FREE,
    "type": ("int", None),
    "num_bits": (2, 4, 8),
    "strategy": ("channel", "group", "tensor"),
    "group_size": (None, -1, WHOLE),
    "symmetric": (True, False, None),
    "dynamic": (False, None),
    "actorder": (*NOTHING, "weight", "static", "group", "dynamic"),
    "block_structure": NOTHING,
}
_FLOAT8: Fields = {
    **_FREE,
    "type": ("float",),
    "num_bits": (8,),
    "strategy": ("channel", "tensor", "block"),
    "group_size": (None, -1),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "actorder": NOTHING,
    "block_structure": (None, [WHOLE, WHOLE]),
}

# Of inputs that a format rounds: they are not rounded where weights are dequantised, and a row is alone either way.
_INPUTS: Fields = {
    **_FREE,
    "num_bits": (8,),
    "strategy": ("token", "group", "tensor"),
    "group_size": (None, WHOLE),
    "symmetric": (True, None),
    "dynamic": (True, False, None),
    "actorder": NOTHING,
    "block_structure": NOTHING,
}
_FLOAT4 = {**_FLOAT8, "num_bits": (4,), "block_structure": NOTHING}
_FLOAT4_INPUTS: Fields = {
    **_INPUTS,
    "type": ("float",),
    "num_bits": (4, 8),
    "strategy": ("tensor_group", "group", "token", "tensor"),
    "dynamic": ("local", True, False, None),
}
_FORMATS: Mapping[str, tuple[Fields, Fields]] = {  # the fields of weights and of inputs
    "pack-quantized": ({**_INTEGERS, "strategy": ("channel", "group")}, {**_INPUTS, "type": ("int", None)}),
    "int-quantized": (_INTEGERS, {**_INPUTS, "type": ("int", None)}),
    "float-quantized": (_FLOAT8, {**_INPUTS, "type": ("float",)}),
    "nvfp4-pack-quantized": ({**_FLOAT4, "strategy": ("tensor_group",), "group_size": (16,)}, _FLOAT4_INPUTS),
    "mxfp4-pack-quantized": ({**_FLOAT4, "strategy": ("group",), "group_size": (32,)}, _FLOAT4_INPUTS),
}
_FLOAT4_SCALES = {"nvfp4-pack-quantized": "weight_global_scale", "mxfp4-pack-quantized": None}
_NAIVE = "naive-quantized"  # either of the last two


def schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The ways in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _OF_CHECKPOINT, _WORDS)
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"quantization_config.config_groups is {groups!r}: it names no group")
    return [_scheme(f"quantization_config.config_groups.{n}", group, stored["format"]) for n, group in groups.items()]


def _scheme(place: str, group: Any, of_all: str) -> Scheme:
    forms = (*_FORMATS, _NAIVE)
    own = (None, *forms) if of_all in forms else forms
    check_fields(place, group, {"targets": ANY, "format": own, "weights": ANY, "input_activations": ANY}, _WORDS)
    weights, inputs = group.get("weights"), group.get("input_activations") or {}
    form = group.get("format") or of_all
    if form == _NAIVE:
        is_float = isinstance(weights, Mapping) and weights.get("type") == "float"
        form = "float-quantized" if is_float else "int-quantized"
    of_weights, of_inputs = _FORMATS[form]
    check_fields(f"{place}.weights", weights, of_weights, f"{_WORDS}' {form}")
    if inputs:
        check_fields(f"{place}.input_activations", inputs, of_inputs, f"{_WORDS}' {form}")
    if form in _FLOAT4_SCALES:
        whole = _FLOAT4_SCALES[form]
        return Float4Scheme(f"{_WORDS}' {form}", "weight_packed", weights["group_size"], whole, "input_global_scale")
    if inputs and (inputs["strategy"] == "tensor") is (inputs.get("dynamic") is True):
        found = f"is {inputs.get('dynamic')!r}; of {_WORDS} served is False with the strategy 'tensor', else True"
        raise ValueError(f"{place}.input_activations.dynamic {found}")
    if form != "float-quantized":
        return _Integers(form, weights)
    block = weights.get("block_structure") if weights["strategy"] == "block" else None
    if weights["strategy"] == "block" and block is None:
        raise ValueError(f"{place}.weights.block_structure is not there, and the strategy is 'block'")
    by_token = inputs.get("strategy") == "token" and block is None
    of_inputs_too = ("input_scale",) if inputs.get("strategy") == "tensor" else ()
    return Float8Scheme("fp8", block, "weight_scale", *of_inputs_too, rounds_tokens=by_token)


class _Integers(Scaled):
    def __init__(self, form: str, fields: Mapping[str, Any]) -> None:
        """`fields`: checked, of the weights."""
        self.bits = fields["num_bits"]
        self._is_packed = form == "pack-quantized"
        self.words = f"{_WORDS}' {form}, {self.bits} bits"
        self.numbers, self.types = ("weight_packed", ("I32",)) if self._is_packed else ("weight", ("I8",))
        self._group_size = fields.get("group_size") if fields["strategy"] == "group" else None
        if fields["strategy"] == "group" and self._group_size in (None, -1):
            raise ValueError("quantization_config: weights have the strategy 'group' and no group_size")
        self._is_one = fields["strategy"] == "tensor"
        self._is_symmetric = fields.get("symmetric") is not False
        self._has_order = fields.get("actorder") in ("group", "dynamic")

    def size(self, layer: StoredLayer) -> tuple[int, int]:
        if not self._is_packed:
            return super().size(layer)
        if layer.forms.get("weight_shape", ("", []))[1] != [2]:
            raise ValueError("the files lack weight_shape, two numbers")
        num_outputs, num_inputs = layer.read("weight_shape").tolist()
        return num_outputs, num_inputs

    def parts(self, num_outputs: int, num_inputs: int, layer: StoredLayer) -> Mapping[str, Part]:
        beside = (num_outputs, num_groups(num_inputs, self._group_size))
        shapes = ((1,), (1, 1), ()) if self._is_one else (beside,)
        parts = {"weight_scale": Part(FLOATS, shapes)}
        if self._is_packed:
            parts["weight_packed"] = Part(("I32",), ((num_outputs, self._num_words(num_inputs)),))
            parts["weight_shape"] = Part(("I64", "I32"), ((2,),))
        if not self._is_symmetric and self._is_packed:
            parts["weight_zero_point"] = Part(("I32",), ((self._num_words(num_outputs), beside[1]),))
        elif not self._is_symmetric:
            parts["weight_zero_point"] = Part(("I8",), shapes)
        if self._has_order:
            parts["weight_g_idx"] = Part(("I32", "I64"), ((num_inputs,),))
        return parts

    def scales(self, layer: StoredLayer) -> Scales:
        num_outputs, num_inputs = self.size(layer)
        scales, zeros = layer.read("weight_scale"), None if self._is_symmetric else layer.read("weight_zero_point")
        if zeros is not None and self._is_packed:
            zeros = unpacked(zeros.t(), self.bits)[:, :num_outputs].t()
        if self._is_one:
            scales = scales.reshape(1, 1).expand(num_outputs, 1)
            zeros = None if zeros is None else zeros.reshape(1, 1).expand(num_outputs, 1)
        groups = layer.read("weight_g_idx").long() if self._has_order else None
        return Scales(scales, self._group_size or num_inputs, zeros, groups)

    def codes(self, layer: StoredLayer) -> Tensor:
        codes = layer.read(self.numbers)
        if self._is_packed:
            return unpacked(codes, self.bits)[:, : self.size(layer)[1]]
        half = 1 << (self.bits - 1)
        low, high = (int(found) for found in codes.aminmax())
        if low < -half or high >= half:
            raise ValueError(f"weight has numbers from {low} to {high}, beyond {self.bits} bits")
        return codes

    def _num_words(self, count: int) -> int:
        return math.ceil(count * self.bits / 32)
