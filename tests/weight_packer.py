"""Tiny checkpoints with packed weights, written by the documentation of each format alone, number by number, and what
they hold.

`tests/model/loading/test_packed_checkpoints.py` compares some with what the formats' own libraries wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.float4_packer import compressed_config, eight_bits, four_bits, mxfp4, nvfp4
from tests.float8_packer import WEIGHTS, edit_config, is_quantized, rewritten
from tests.float8_packer import config_of as float8_config_of

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Rounded:
    """A weight as integers from 0 up: W[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g], g = groups[i]."""

    codes: Tensor  # [out, in]
    scales: Tensor  # [out, num_groups]
    zeros: Tensor  # [out, num_groups]
    groups: Tensor  # [in]

    def dequantized(self) -> Tensor:
        numbers = self.codes.double() - self.zeros.double()[:, self.groups]
        return (numbers * self.scales.double()[:, self.groups]).float()


def rounded(
    weight: Tensor, bits: int, group_size: int | None, *, symmetric: bool, ordered: bool, least: int = 1
) -> Rounded:
    """`ordered`: inputs lie in groups in another order than their own. `least`: of zero points, if not symmetric."""
    num_inputs, top = weight.shape[1], (1 << bits) - 1
    size = group_size or num_inputs
    groups = torch.arange(num_inputs) // size
    if ordered:
        groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(5))]
    scales, zeros = [], []
    for group in range(num_inputs // size):
        part = weight[:, groups == group]
        if symmetric:
            scales.append(part.abs().amax(1) / (top // 2))
            zeros.append(torch.full((len(weight),), (top + 1) // 2))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append((high - low) / top)
            zeros.append((-low / scales[-1]).round().clamp(least, top).long())
    scale, zero = torch.stack(scales, 1).half().float(), torch.stack(zeros, 1)
    codes = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, top).long()
    return Rounded(codes, scale, zero, groups)


def words(numbers: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Integers along a dimension in words of 32 bits, from the lowest bits up; `order`: which of each word."""
    lines = numbers.movedim(dim, -1)
    count = 32 // bits
    lines = torch.nn.functional.pad(lines, (0, -lines.shape[-1] % count))
    found = torch.zeros(*lines.shape[:-1], lines.shape[-1] // count, dtype=torch.int64)
    for place, which in enumerate(order or range(count)):
        found += lines[..., which::count] << (bits * place)
    found = torch.where(found >= 1 << 31, found - (1 << 32), found)
    return found.to(torch.int32).movedim(-1, dim)


def compressed(found: Rounded, bits: int, *, symmetric: bool, ordered: bool, packed: bool) -> Tensors:
    """As compressed-tensors writes it: pack-quantized, or int-quantized."""
    half = 1 << (bits - 1)
    tensors = {"weight_scale": found.scales}
    if packed:
        tensors |= {"weight_packed": words(found.codes, bits, 1), "weight_shape": torch.tensor(found.codes.shape)}
    else:
        tensors["weight"] = (found.codes - half).to(torch.int8)
    if not symmetric:
        tensors["weight_zero_point"] = words(found.zeros, bits, 0) if packed else (found.zeros - half).to(torch.int8)
    if ordered:
        tensors["weight_g_idx"] = found.groups.to(torch.int32)
    return tensors


def gptq(found: Rounded, bits: int, *, less: int) -> Tensors:
    """As GPTQ's packers write it; zero points are stored less this."""
    return {
        "qweight": words(found.codes, bits, 1).t(),
        "qzeros": words(found.zeros - less, bits, 0).t(),
        "scales": found.scales.t().half(),
        "g_idx": found.groups.to(torch.int32),
    }


def awq(found: Rounded) -> Tensors:
    """As AutoAWQ's gemm writes it."""
    return {
        "qweight": words(found.codes.t(), 4, 1, AWQ_ORDER),
        "qzeros": words(found.zeros.t(), 4, 1, AWQ_ORDER),
        "scales": found.scales.t().half(),
    }


@dataclass(frozen=True)
class Kind:
    """One way to pack: `quantization_config`, and what it makes of a weight [out, in]: tensors, and W dequantised."""

    config: dict[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]


def _compressed(
    bits: int, group: int | None = None, *, symmetric: bool = True, order: str | None = None, packed: bool = True
) -> Kind:
    name = "pack-quantized" if packed else "int-quantized"
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group, "dynamic": False,
        "strategy": "channel" if group is None else "group", "actorder": order, "block_structure": None,
        "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    targets = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"], "version": "0.15.0",
        "config_groups": {"group_0": targets}, "quantization_status": "compressed", "sparsity_config": {},
    }  # fmt: skip

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = rounded(weight, bits, group, symmetric=symmetric, ordered=order == "group")
        parts = compressed(found, bits, symmetric=symmetric, ordered=order == "group", packed=packed)
        return parts, found.dequantized()

    return Kind(config, pack)


def _gptq(
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    version: str = "gptq",
    borrows: bool = False,
) -> Kind:
    """`borrows`: as GPTQModel writes zero points, of a whole word less one in each place."""
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered,
        "checkpoint_format": version, "damp_percent": 0.1, "true_sequential": True, "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:2.0.0" if borrows else "auto_gptq:0.7.1"]}, "pack_dtype": "int32",
    }  # fmt: skip

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        size = None if group == -1 else group
        if borrows:
            weight = weight.clone()
            weight[::3] += weight[::3].abs().amax(1, keepdim=True)  # rows whose zero points are 0
        found = rounded(
            weight, bits, size, symmetric=symmetric, ordered=ordered, least=int(version == "gptq" and not borrows)
        )
        parts = gptq(found, bits, less=int(version == "gptq" and not borrows))
        if borrows:
            ones = sum(1 << place for place in range(0, 32, bits))
            parts["qzeros"] = parts["qzeros"] - ones
        return parts, found.dequantized()

    return Kind(config, pack)


def _awq(group: int) -> Kind:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = rounded(weight, 4, None if group == -1 else group, symmetric=False, ordered=False)
        return awq(found), found.dequantized()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Kind({**config, "modules_to_not_convert": None}, pack)


def _float8(config: dict[str, Any], scale: str, block: tuple[int, int] | None, **beside: float) -> Kind:
    """FP8 with a scale for each block, or one in all; `beside`: further scales of a layer."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = block or weight.shape
        numbers, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), []
        plain = torch.empty_like(weight)
        for top in range(0, len(weight), rows):
            scales.append([])
            for left in range(0, weight.shape[1], columns):
                where = slice(top, top + rows), slice(left, left + columns)
                scales[-1].append(weight[where].abs().amax() / 448)
                numbers[where] = (weight[where] / scales[-1][-1]).to(torch.float8_e4m3fn)
                plain[where] = (numbers[where].double() * scales[-1][-1].double()).float()
        stored = torch.tensor(scales) if block else scales[0][0]
        return {"weight": numbers, scale: stored, **{n: torch.tensor(v) for n, v in beside.items()}}, plain

    return Kind(config, pack)


def _float8_blocks_compressed() -> dict[str, Any]:
    config = float8_config_of()
    group = config["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "block", "block_structure": [16, 16]}
    group["input_activations"] |= {"strategy": "group", "group_size": 16}
    return config


def _float8_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, (numbers.double() * scale.double()).float()


def _float8_powers(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks of 16, with scales that are powers of two in a byte."""
    scale = torch.nn.functional.max_pool2d(weight.abs()[None], 16)[0].div(448).log2().ceil().exp2()
    spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scale.to(torch.float8_e8m0fnu)}, numbers.float() * spread


_MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.35.0"}, "ignore": ["lm_head"]}
_BITSANDBYTES = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "llm_int8_threshold": 6.0,
}  # fmt: skip
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
KINDS: Mapping[str, Kind] = {
    "w4a16": _compressed(4, 16),
    "w4a16_channel": _compressed(4),
    "w4a16_asymmetric": _compressed(4, 16, symmetric=False),
    "w4a16_actorder": _compressed(4, 8, symmetric=False, order="group"),
    "w4a16_actorder_weight": _compressed(4, 16, order="weight"),
    "w8a16": _compressed(8),
    "w8a16_asymmetric": _compressed(8, 32, symmetric=False, order="group"),
    "w2a16": _compressed(2, 8, symmetric=False),
    "int8": _compressed(8, packed=False),
    "int8_asymmetric": _compressed(8, 16, symmetric=False, packed=False, order="group"),
    "int4_in_bytes": _compressed(4, 16, packed=False),
    "gptq": _gptq(4, 16),
    "gptq_desc_act": _gptq(4, 16, symmetric=False, ordered=True),
    "gptq_v2": _gptq(4, 8, symmetric=False, version="gptq_v2"),
    "gptq_8": _gptq(8, -1, symmetric=False),
    "gptq_8_desc_act": _gptq(8, 16, ordered=True, version="gptq_v2"),
    "gptq_2": _gptq(2, 8, symmetric=False),
    "gptq_of_gptqmodel": _gptq(4, 8, symmetric=False, borrows=True),
    "gptq_8_of_gptqmodel": _gptq(8, 32, symmetric=False, borrows=True),
    "awq": _awq(16),
    "awq_channel": _awq(-1),
    "fp8_blocks": _float8({**_FP8, "weight_block_size": [24, 20]}, "weight_scale_inv", (24, 20)),
    "fp8_blocks_that_divide": _float8({**_FP8, "weight_block_size": [16, 8]}, "weight_scale_inv", (16, 8)),
    "fp8_static": _float8({**_FP8, "activation_scheme": "static"}, "weight_scale", None, input_scale=0.02),
    "fp8_blocks_compressed": _float8(_float8_blocks_compressed(), "weight_scale", (16, 16)),
    "fp8_powers": Kind({**_FP8, "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}, _float8_powers),
    "fp8_modelopt": _float8(
        {**_MODELOPT, "quant_algo": "FP8", "group_size": None}, "weight_scale", None, input_scale=0.02, k_scale=1.0
    ),
    "nvfp4": Kind(compressed_config("nvfp4-pack-quantized"), lambda weight: nvfp4(weight, divides=True)),
    "nvfp4_modelopt": Kind(
        {**_MODELOPT, "quant_algo": "NVFP4", "group_size": 16}, lambda weight: nvfp4(weight, divides=False)
    ),
    "mxfp4": Kind(compressed_config("mxfp4-pack-quantized"), mxfp4),
    "nf4": Kind(_BITSANDBYTES, lambda weight: four_bits(weight, "nf4", nested=4)),
    "nf4_plain": Kind(_BITSANDBYTES, lambda weight: four_bits(weight, "nf4", 128)),
    "fp4": Kind(_BITSANDBYTES, lambda weight: four_bits(weight, "fp4")),
    "llm_int8": Kind({**_BITSANDBYTES, "load_in_4bit": False, "load_in_8bit": True}, eight_bits),
    "fbgemm_fp8": Kind({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, _float8_rows),
}


def save_unpacked(packed: Path, folder: Path) -> Path:
    """The plain float32 checkpoint with the numbers of a symmetric one of compressed-tensors, in one file."""
    stored = load_file(packed / WEIGHTS)

    def unpack(name: str, tensor: Tensor) -> Tensors:
        layer, _, last = name.rpartition(".")
        scale = stored.get(f"{layer}.weight_scale")
        if scale is None or last == "bias":
            return {name: tensor.float()}
        if last not in ("weight", "weight_packed"):
            return {}
        numbers = tensor.double()
        if last == "weight_packed":
            num_inputs = int(stored[f"{layer}.weight_shape"][1])
            bits = 4 if tensor.shape[1] * 8 == num_inputs else 8
            places = (tensor.long()[..., None] >> torch.arange(0, 32, bits)) & ((1 << bits) - 1)
            numbers = places.flatten(1)[:, :num_inputs].double() - (1 << (bits - 1))
        wide = scale.double().repeat_interleave(numbers.shape[1] // scale.shape[1], 1)
        return {f"{layer}.weight": (numbers * wide).float()}

    return edit_config(rewritten(packed, folder, unpack), quantization_config=None, dtype="float32")


def save_packed(kind: Kind, plain: Path, root: Path) -> tuple[Path, Path]:
    """A checkpoint packed from the plain one, and the plain one with the very numbers of that."""

    def pack(name: str, weight: Tensor) -> Tensors:
        if not is_quantized(name):
            return {name: weight}
        return {f"{name.removesuffix('weight')}{last}": part for last, part in kind.pack(weight)[0].items()}

    def unpack(name: str, weight: Tensor) -> Tensors:
        return {name: kind.pack(weight)[1] if is_quantized(name) else weight}

    packed = edit_config(rewritten(plain, root / "packed", pack), quantization_config=kind.config)
    return packed, rewritten(plain, root / "dequantized", unpack)
