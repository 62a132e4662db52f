"""Packed weights of bitsandbytes: a table's numbers of 4 bits (nf4, fp4), and LLM.int8()'s weights alone.

4 bits: `weight` holds two numbers a byte, the upper half first, in the order of the whole weight, of whose every
`blocksize` numbers one of `absmax` is the scale. With double quantisation absmax is itself a byte, which stands for
nested_quant_map[byte] * nested_absmax + nested_offset. `quant_state` is JSON in bytes, and says the sizes.
int8: W = weight * SCB / 127, by rows; inputs stay as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.loading.packed_format import (
    ANY,
    WHOLE,
    Fields,
    Kind,
    Part,
    Scaled,
    Scheme,
    StoredLayer,
    check_fields,
)
from lora_serve.model.loading.packed_weight import CodedWeight, Scales

_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE = 4096  # bytes
_KINDS = ("nf4", "fp4")
_FIELDS: Fields = {
    "quant_method": ("bitsandbytes",),
    "load_in_4bit": (True, False, None),
    "load_in_8bit": (True, False, None),
    "bnb_4bit_quant_storage": (None, "uint8"),
    **dict.fromkeys(
        ("_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
         "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold"),
        ANY,
    ),
}  # fmt: skip
_NUMBER = Kind("a finite number", lambda found: type(found) in (int, float) and math.isfinite(found))


def schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The way in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _FIELDS, "bitsandbytes")
    return [_FourBits() if stored.get("load_in_4bit") else _EightBits()]


class _EightBits(Scaled):
    words, bits, numbers, types = "bitsandbytes, 8 bits", 8, "weight", ("I8",)

    def parts(self, num_outputs: int, num_inputs: int, layer: StoredLayer) -> Mapping[str, Part]:
        return {"SCB": Part(("F32",), ((num_outputs,),)), "weight_format": Part(("U8",), ((), (1,)), is_needed=False)}

    def scales(self, layer: StoredLayer) -> Scales:
        if "weight_format" in layer.forms and bool(layer.read("weight_format").any()):
            raise ValueError("weight_format is not that of rows")
        return Scales(layer.read("SCB")[:, None] / 127, self.size(layer)[1])

    def codes(self, layer: StoredLayer) -> Tensor:
        return layer.read("weight")


class _FourBits(Scheme):
    words, bits, numbers, types = "bitsandbytes, 4 bits", 4, "weight", ("U8",)

    def size(self, layer: StoredLayer) -> tuple[int, int]:
        num_outputs, num_inputs = _state(layer)["shape"]
        return num_outputs, num_inputs

    def parts(self, num_outputs: int, num_inputs: int, layer: StoredLayer) -> Mapping[str, Part]:
        state, count = _state(layer), num_outputs * num_inputs
        if layer.forms["weight"][1] != [math.ceil(count / 2), 1]:
            raise ValueError(
                f"weight is {layer.forms['weight'][1]}; of {count} numbers it is [{math.ceil(count / 2)}, 1]"
            )
        blocks = math.ceil(count / state["blocksize"])
        parts = {name: Part(("U8",), (tuple(layer.forms[name][1]),)) for name in layer.forms if name.startswith(_STATE)}
        parts |= {"weight.quant_map": Part(("F32",), ((16,),))}
        if "nested_blocksize" not in state:
            return {**parts, "weight.absmax": Part(("F32",), ((blocks,),))}
        return {
            **parts,
            "weight.absmax": Part(("U8",), ((blocks,),)),
            "weight.nested_absmax": Part(("F32",), ((math.ceil(blocks / state["nested_blocksize"]),),)),
            "weight.nested_quant_map": Part(("F32",), ((256,),)),
        }

    def check(self, layer: StoredLayer) -> None:
        table = layer.read("weight.quant_map")
        if not bool((table.isfinite() & (table.abs() <= 1)).all()):
            raise ValueError("weight.quant_map has numbers that are not from -1 to 1")
        Scales(_largest(layer)[:, None], 1, is_signed=True).check(self.bits)

    def weight(self, layer: StoredLayer) -> CodedWeight:
        (num_outputs, num_inputs), block = self.size(layer), _state(layer)["blocksize"]
        data, table, largest = layer.read("weight").flatten(), layer.read("weight.quant_map"), _largest(layer)

        def rows(which: slice) -> Tensor:
            begin, end = which.start * num_inputs, which.stop * num_inputs
            packed = data[begin // 2 : (end + 1) // 2]
            codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[begin % 2 :][: end - begin]
            places = torch.arange(begin, end) // block
            return (table[codes.int()] * largest[places]).view(-1, num_inputs)

        return CodedWeight((num_outputs, num_inputs), rows)


def _largest(layer: StoredLayer) -> Tensor:
    """The scale of each block."""
    state, stored = _state(layer), layer.read("weight.absmax")
    if "nested_blocksize" not in state:
        return stored
    places = torch.arange(len(stored)) // state["nested_blocksize"]
    found = layer.read("weight.nested_quant_map")[stored.int()] * layer.read("weight.nested_absmax")[places]
    largest: Tensor = found + state["nested_offset"]
    return largest


def _state(layer: StoredLayer) -> Mapping[str, Any]:
    """The checked content of quant_state. Raises ValueError."""
    names = [name for name in layer.forms if name.startswith(_STATE)]
    if len(names) != 1:
        raise ValueError(f"it has {len(names)} quant_state")
    dtype, shape = layer.forms[names[0]]
    if dtype != "U8" or len(shape) != 1 or shape[0] > _MAX_STATE:
        raise ValueError(f"{names[0]} is {dtype} {shape}, no text of at most {_MAX_STATE} bytes")
    try:
        state = json.loads(bytes(layer.read(names[0]).tolist()))
    except RecursionError:
        raise ValueError(f"{names[0]} is no JSON") from None
    fields: Fields = {
        "quant_type": (names[0].removeprefix(_STATE),),
        "blocksize": (WHOLE,),
        "shape": ([WHOLE, WHOLE],),
        "dtype": ANY,
    }
    if isinstance(state, Mapping) and "nested_blocksize" in state:
        fields = {**fields, "nested_blocksize": (WHOLE,), "nested_offset": (_NUMBER,), "nested_dtype": ANY}
    check_fields("quant_state", state, fields, "bitsandbytes")
    if state["quant_type"] not in _KINDS:
        raise ValueError(f"quant_state is of {state['quant_type']}; served are {' and '.join(_KINDS)}")
    found: Mapping[str, Any] = state
    return found
