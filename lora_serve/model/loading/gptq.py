"""Packed weights of GPTQ (`quant_method: gptq`), as AutoGPTQ and GPTQModel write them.

`qweight` [in * bits / 32, out] and `qzeros` [groups, out * bits / 32] int32, `scales` [groups, out], `g_idx` [in]: the
group of each input. The zero points of `checkpoint_format` gptq are stored less one, those of gptq_v2 as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.loading.packed_format import (
    ANY,
    FLOATS,
    NOTHING,
    WHOLE,
    Fields,
    Part,
    Scheme,
    StoredLayer,
    check_fields,
    num_groups,
)
from lora_serve.model.loading.packed_weight import Scales, unpacked

_FORMATS = (None, "gptq", "gptq_v2")
_HOW_IT_WAS_MADE = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "exllama_config", "group_aware", "lm_head", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "pad_token_id", "static_groups", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama", "v2",
)  # fmt: skip
_FIELDS: Fields = {
    "quant_method": ("gptq",),
    "bits": (2, 4, 8),
    "group_size": (-1, WHOLE),
    "desc_act": (True, False, None),
    "sym": (True, False, None),
    "checkpoint_format": _FORMATS,
    "format": _FORMATS,
    "is_marlin_format": NOTHING,
    "pack_dtype": (None, "int32"),
    **dict.fromkeys(_HOW_IT_WAS_MADE, ANY),
}


def schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The way in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _FIELDS, "gptq")
    return [_Gptq(stored)]


class _Gptq(Scheme):
    numbers = "qweight"

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """`fields`: checked."""
        self.bits = fields["bits"]
        self.words = f"gptq, {self.bits} bits"
        self._group_size = None if fields["group_size"] == -1 else fields["group_size"]
        self._has_order = bool(fields.get("desc_act"))
        self._is_symmetric = fields.get("sym") is not False
        self._less = 0 if "gptq_v2" in (fields.get("checkpoint_format"), fields.get("format")) else 1

    def size(self, layer: StoredLayer) -> tuple[int, int]:
        rows, num_outputs = layer.forms["qweight"][1]
        return num_outputs, rows * 32 // self.bits

    def parts(self, num_outputs: int, num_inputs: int) -> Mapping[str, Part]:
        groups = num_groups(num_inputs, self._group_size)
        if num_outputs * self.bits % 32:
            raise ValueError(f"words of 32 bits do not divide its {num_outputs} outputs of {self.bits}")
        return {
            "qweight": Part(self.types, ((num_inputs * self.bits // 32, num_outputs),)),
            "qzeros": Part(("I32",), ((groups, num_outputs * self.bits // 32),)),
            "scales": Part(FLOATS, ((groups, num_outputs),)),
            "g_idx": Part(("I32", "I64"), ((num_inputs,),), is_needed=self._has_order),
        }

    def scales(self, layer: StoredLayer) -> Scales:
        num_inputs = self.size(layer)[1]
        size = self._group_size or num_inputs
        zeros: Tensor | None = unpacked(layer.read("qzeros"), self.bits).t().to(torch.int16) + self._less
        if self._is_symmetric:
            if bool(zeros.any()):
                raise ValueError("its zero points are not in the middle, and config.json says sym")
            zeros = None
        groups = layer.read("g_idx").long() if "g_idx" in layer.forms else None
        if groups is not None and not self._has_order:
            if not torch.equal(groups, torch.arange(num_inputs) // size):
                raise ValueError("its g_idx changes the order of inputs, and config.json does not say desc_act")
            groups = None
        return Scales(layer.read("scales").t(), size, zeros, groups)

    def codes(self, layer: StoredLayer) -> Tensor:
        return unpacked(layer.read("qweight").t(), self.bits)
