"""Packed weights of GPTQ, as AutoGPTQ and GPTQModel write them, and of AWQ in the order of AutoAWQ's gemm.

Both have `qzeros` [groups, out * bits / 32] in words of int32 and `scales` [groups, out], GPTQ also `g_idx` [in], the
group of each input. GPTQ's `qweight` is [in * bits / 32, out], and zero points are stored less one, but for gptq_v2.
AWQ's is [in, out / 8], and its words hold, from the lowest bits up, the outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight.
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
    Kind,
    Part,
    Scaled,
    Scheme,
    StoredLayer,
    check_fields,
    num_groups,
)
from lora_serve.model.loading.packed_weight import Scales, unpacked

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of eight outputs
_GPTQ_FORMATS, _AWQ_FORMATS = (None, "gptq", "gptq_v2"), (None, "gemm", "GEMM")
_SKIPS = Kind(
    "rules that leave layers out", lambda found: isinstance(found, Mapping) and {str(x)[:2] for x in found} == {"-:"}
)
_HOW_IT_WAS_MADE = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "group_aware",
    "lm_head", "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "modules_to_not_convert",
    "mse", "pad_token_id", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2",
)  # fmt: skip
_GPTQ: Fields = {
    "quant_method": ("gptq",),
    "bits": (2, 4, 8),
    "group_size": (-1, WHOLE),
    "desc_act": (True, False, None),
    "sym": (True, False, None),
    "dynamic": (*NOTHING, _SKIPS),
    "method": (None, "gptq"),
    "checkpoint_format": _GPTQ_FORMATS,
    "format": _GPTQ_FORMATS,
    "is_marlin_format": NOTHING,
    "pack_dtype": (None, "int32"),
    **dict.fromkeys(_HOW_IT_WAS_MADE, ANY),
}
_AWQ: Fields = {
    "quant_method": ("awq",),
    "bits": (None, 4),
    "w_bit": (None, 4),
    "group_size": (None, -1, WHOLE),
    "q_group_size": (None, -1, WHOLE),
    "zero_point": (True, False),
    "desc_act": NOTHING,
    "sym": (True, False, None),
    "dynamic": (*NOTHING, _SKIPS),
    "method": (None, "awq"),
    "version": _AWQ_FORMATS,
    "checkpoint_format": _AWQ_FORMATS,
    "format": _AWQ_FORMATS,
    "pack_dtype": (None, "int32"),
    **dict.fromkeys(_HOW_IT_WAS_MADE, ANY),
}


def gptq_schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The way in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _GPTQ, "gptq")
    return [_Gptq(stored["bits"], stored["group_size"], stored)]


def awq_schemes(stored: Mapping[str, Any]) -> Sequence[Scheme]:
    """The way in which layers are packed. Raises ValueError."""
    check_fields("quantization_config", stored, _AWQ, "awq")
    sizes = {stored[name] for name in ("group_size", "q_group_size") if stored.get(name) is not None}
    if len(sizes) != 1:
        raise ValueError(f"quantization_config.group_size is not one number, but {sorted(sizes)}")
    return [_Awq(4, sizes.pop(), {"sym": not stored["zero_point"]})]


class _Gptq(Scaled):
    numbers = "qweight"
    method = "gptq"

    def __init__(self, bits: int, group_size: int, fields: Mapping[str, Any]) -> None:
        """`group_size`: -1 for all inputs. `fields`: checked ones of GPTQ."""
        self.bits = bits
        self.words = f"{self.method}, {bits} bits"
        self._group_size = None if group_size == -1 else group_size
        self._has_order, self._is_symmetric = bool(fields.get("desc_act")), fields.get("sym") is not False
        self._is_less = "gptq_v2" not in (fields.get("checkpoint_format"), fields.get("format"))
        self._borrows = "gptqmodel" in str(fields.get("meta"))  # it took one of each in one subtraction of the word

    def size(self, layer: StoredLayer) -> tuple[int, int]:
        num_words, num_outputs = layer.forms["qweight"][1]
        return num_outputs, num_words * 32 // self.bits

    def parts(self, num_outputs: int, num_inputs: int, layer: StoredLayer) -> Mapping[str, Part]:
        groups = num_groups(num_inputs, self._group_size)
        if num_outputs * self.bits % 32:
            raise ValueError(f"its {num_outputs} outputs of {self.bits} bits do not fill words of 32")
        return {
            "qzeros": Part(("I32",), ((groups, num_outputs * self.bits // 32),)),
            "scales": Part(FLOATS, ((groups, num_outputs),)),
            "g_idx": Part(("I32", "I64"), ((num_inputs,),), is_needed=self._has_order),
        }

    def scales(self, layer: StoredLayer) -> Scales:
        num_inputs = self.size(layer)[1]
        size, zeros = self._group_size or num_inputs, self._zeros(layer.read("qzeros"))
        if self._is_symmetric and bool(zeros.any()):
            raise ValueError("its zero points are not in the middle, and config.json says that they are")
        groups = layer.read("g_idx").long() if "g_idx" in layer.forms else None
        if groups is not None and not self._has_order:
            if not torch.equal(groups, torch.arange(num_inputs) // size):
                raise ValueError("its g_idx changes the order of inputs, and config.json does not say desc_act")
            groups = None
        return Scales(layer.read("scales").t(), size, None if self._is_symmetric else zeros, groups)

    def codes(self, layer: StoredLayer) -> Tensor:
        return unpacked(layer.read("qweight").t(), self.bits)

    def _zeros(self, words: Tensor) -> Tensor:
        """[groups, out * bits / 32] int32 -> [out, groups]."""
        if not self._is_less:
            return unpacked(words, self.bits).t()
        if self._borrows:
            return unpacked(words + sum(1 << place for place in range(0, 32, self.bits)), self.bits).t()
        return unpacked(words, self.bits).t().to(torch.int16) + 1


class _Awq(_Gptq):
    method = "awq"

    def size(self, layer: StoredLayer) -> tuple[int, int]:
        num_inputs, num_words = layer.forms["qweight"][1]
        return num_words * 8, num_inputs

    def codes(self, layer: StoredLayer) -> Tensor:
        return self._zeros(layer.read("qweight"))

    def _zeros(self, words: Tensor) -> Tensor:
        numbers = unpacked(words, 4)
        return numbers.view(len(numbers), -1, 8)[..., _AWQ_PLACES].flatten(1).t()
