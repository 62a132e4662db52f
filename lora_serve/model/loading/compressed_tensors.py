"""Packed weights of compressed-tensors: integers in words or bytes, and FP8; groups of layers may differ in kind.

pack-quantized has `weight_packed` [out, in * bits / 32] int32 and `weight_shape`, two numbers; int-quantized `weight`
[out, in] int8; float-quantized `weight` [out, in] float8_e4m3fn. All have `weight_scale`, asymmetric integers too
`weight_zero_point`, and `weight_g_idx` [in] names the group of each input where their order was changed (`actorder`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lora_serve.model.loading.float8_formats import Float8Scheme
from lora_serve.model.loading.packed_format import (
    ANY,
    FLOATS,
    NOTHING,
    WHOLE,
    Fields,
    Kind,
    Part,
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
    "format": ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
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


def _inputs(type_: str, strategy: str, *, dynamic: bool) -> Fields:
    """The fields of inputs that are rounded. They are not, where weights are dequantised; a row is alone either way."""
    return {
        **_FREE,
        "type": (type_,),
        "num_bits": (8,),
        "strategy": (strategy,),
        "dynamic": (True,) if dynamic else (False, None),
        "group_size": (WHOLE,) if strategy == "group" else NOTHING,
        "symmetric": (True, None),
        "actorder": NOTHING,
        "block_structure": NOTHING,
    }


# By format: the fields of weights, and those of inputs by their strategy.
_FORMATS: Mapping[str, tuple[Fields, Mapping[str, Fields]]] = {
    "pack-quantized": ({**_INTEGERS, "strategy": ("channel", "group")}, {}),
    "int-quantized": (_INTEGERS, {"token": _inputs("int", "token", dynamic=True)}),
    "float-quantized": (
        _FLOAT8,
        {
            "token": _inputs("float", "token", dynamic=True),
            "group": _inputs("float", "group", dynamic=True),
            "tensor": _inputs("float", "tensor", dynamic=False),
        },
    ),
}
_NAIVE = {"int": "int-quantized", "float": "float-quantized"}


def schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The ways in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _OF_CHECKPOINT, _WORDS)
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"quantization_config.config_groups is {groups!r}: it names no group")
    return [_scheme(f"quantization_config.config_groups.{n}", group, stored["format"]) for n, group in groups.items()]


def _scheme(place: str, group: Any, of_all: str) -> Scheme:
    formats = (*_FORMATS, "naive-quantized")
    own = (None, *formats) if of_all in formats else formats
    check_fields(place, group, {"targets": ANY, "format": own, "weights": ANY, "input_activations": ANY}, _WORDS)
    weights, inputs = group.get("weights"), group.get("input_activations")
    form = group.get("format") or of_all
    if form == "naive-quantized":
        form = _NAIVE.get(weights.get("type", "int") if isinstance(weights, Mapping) else "int", form)
    of_weights, by_strategy = _FORMATS[form]
    check_fields(f"{place}.weights", weights, of_weights, f"{_WORDS}' {form}")
    strategy = None
    if inputs not in NOTHING:
        strategy = inputs.get("strategy") if isinstance(inputs, Mapping) else None
        if strategy not in by_strategy:
            words = " or ".join(map(repr, by_strategy)) or "None, of inputs that are not rounded"
            raise ValueError(
                f"{place}.input_activations.strategy is {strategy!r}; of {_WORDS}' {form} served is {words}"
            )
        check_fields(f"{place}.input_activations", inputs, by_strategy[strategy], f"{_WORDS}' {form}")
    if form != "float-quantized":
        return _Integers(form, weights)
    if weights["strategy"] == "block" and not weights.get("block_structure"):
        raise ValueError(f"{place}.weights.block_structure is not there, and its strategy is 'block'")
    block = weights["block_structure"] if weights["strategy"] == "block" else None
    return Float8Scheme("fp8", block, "weight_scale", "input_scale", rounds_tokens=strategy == "token" and not block)


class _Integers(Scheme):
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
            num_outputs, num_inputs = layer.forms["weight"][1]
            return num_outputs, num_inputs
        if layer.forms.get("weight_shape", ("", []))[1] != [2]:
            raise ValueError("the files lack weight_shape, two numbers")
        num_outputs, num_inputs = layer.read("weight_shape").tolist()
        if not (0 < num_outputs < 1 << 31 and 0 < num_inputs < 1 << 31):
            raise ValueError(f"weight_shape is {num_outputs}, {num_inputs}")
        return num_outputs, num_inputs

    def parts(self, num_outputs: int, num_inputs: int) -> Mapping[str, Part]:
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
        scales, zeros = layer.read("weight_scale"), None
        if not self._is_symmetric:
            zeros = layer.read("weight_zero_point")
            if self._is_packed:
                zeros = unpacked(zeros.t(), self.bits)[:, :num_outputs].t()
        if self._is_one:
            scales, zeros = (None if x is None else x.reshape(1, 1).expand(num_outputs, 1) for x in (scales, zeros))
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
