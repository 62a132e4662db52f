"""Packed weights of AWQ (`quant_method: awq`) in the order of AutoAWQ's gemm.

`qweight` [in, out / 8] and `qzeros` [groups, out / 8] int32, `scales` [groups, out]. From its lowest bits up a word holds
the outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lora_serve.model.loading.packed_format import (
    ANY,
    FLOATS,
    WHOLE,
    Fields,
    Part,
    Scheme,
    StoredLayer,
    check_fields,
    num_groups,
)
from lora_serve.model.loading.packed_weight import Scales, unpacked

_IN_WORD = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight outputs lies
_FORMATS = (None, "gemm", "GEMM")
_HOW_IT_IS_RUN = (
    "backend",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "modules_to_not_convert",
)
_FIELDS: Fields = {
    "quant_method": ("awq",),
    "bits": (None, 4),
    "w_bit": (None, 4),
    "group_size": (None, -1, WHOLE),
    "q_group_size": (None, -1, WHOLE),
    "zero_point": (True,),
    "version": _FORMATS,
    "format": _FORMATS,
    **dict.fromkeys(_HOW_IT_IS_RUN, ANY),
}


def schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The way in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _FIELDS, "awq")
    sizes = {stored[name] for name in ("group_size", "q_group_size") if stored.get(name) is not None}
    if len(sizes) != 1:
        raise ValueError(f"quantization_config.group_size is not one number ({sorted(sizes)})")
    return [_Awq(sizes.pop())]


class _Awq(Scheme):
    words = "awq, 4 bits"
    bits = 4
    numbers = "qweight"

    def __init__(self, group_size: int) -> None:
        self._group_size = None if group_size == -1 else group_size

    def size(self, layer: StoredLayer) -> tuple[int, int]:
        num_inputs, words = layer.forms["qweight"][1]
        return words * 8, num_inputs

    def parts(self, num_outputs: int, num_inputs: int) -> Mapping[str, Part]:
        groups = num_groups(num_inputs, self._group_size)
        return {
            "qweight": Part(self.types, ((num_inputs, num_outputs // 8),)),
            "qzeros": Part(("I32",), ((groups, num_outputs // 8),)),
            "scales": Part(FLOATS, ((groups, num_outputs),)),
        }

    def scales(self, layer: StoredLayer) -> Scales:
        size = self._group_size or self.size(layer)[1]
        return Scales(layer.read("scales").t(), size, _by_output(layer.read("qzeros")))

    def codes(self, layer: StoredLayer) -> Tensor:
        return _by_output(layer.read("qweight"))


def _by_output(words: Tensor) -> Tensor:
    """[rows, out / 8] int32 -> [out, rows] int8."""
    return unpacked(words, 4).unflatten(1, (-1, 8))[..., list(_IN_WORD)].flatten(1).t()
