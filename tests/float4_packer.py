"""Weights in 4 bits that are no integers, and bitsandbytes' 8 bits, packed by the documentation of each format."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
E2M1 = torch.tensor([sign * number for sign in (1, -1) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
# The quantiles of a normal distribution, as the library writes them.
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
FP4 = torch.tensor([0.0, 0.0052083, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]).repeat(2) * torch.tensor(
    [1.0, -1.0]
).repeat_interleave(8)


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    return (numbers[..., None] - table).abs().argmin(-1)


def pack_groups(weight: Tensor, group: int, scales: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] by scales [out, in / group] -> bytes [out, in / 2], lower halves first, and the numbers."""
    spread = scales.repeat_interleave(group, 1)
    codes = nearest(weight / spread, E2M1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), (E2M1[codes].double() * spread.double()).float()


def nvfp4(weight: Tensor, *, divides: bool) -> tuple[Tensors, Tensor]:
    """As compressed-tensors writes it, which divides by the whole layer's scale, or as modelopt does."""
    whole = weight.abs().max() / (6 * 448)
    stored = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    whole = 1 / (1 / whole) if divides else whole
    data, numbers = pack_groups(weight, 16, stored.float() * whole)
    if divides:
        return {"weight_packed": data, "weight_scale": stored, "weight_global_scale": (1 / whole).reshape(1)}, numbers
    beside = {"weight_scale_2": whole, "input_scale": torch.tensor(0.01), "k_scale": torch.tensor(1.0)}
    return {"weight": data, "weight_scale": stored, **beside}, numbers


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    exponents = weight.unflatten(1, (-1, 32)).abs().amax(-1).log2().floor() - 2
    data, numbers = pack_groups(weight, 32, exponents.exp2())
    return {"weight_packed": data, "weight_scale": (exponents + 127).to(torch.uint8)}, numbers


def four_bits(weight: Tensor, kind: str, block: int = 64, nested: int = 0) -> tuple[Tensors, Tensor]:
    """As bitsandbytes writes it. `nested`: numbers of absmax that share a scale in turn."""
    table = {"nf4": NF4, "fp4": FP4}[kind]
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
    largest = flat.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    parts: Tensors = {"weight.quant_map": table.clone(), "weight.absmax": largest}
    if nested:
        offset = largest.mean()
        rest = torch.nn.functional.pad(largest - offset, (0, -len(largest) % nested)).view(-1, nested)
        levels, scales = torch.linspace(-1, 1, 256), rest.abs().amax(1)
        bytes_ = nearest(rest / scales[:, None], levels)
        largest = (levels[bytes_] * scales[:, None] + offset).flatten()[: len(largest)]
        parts |= {"weight.absmax": bytes_.flatten()[: len(largest)].to(torch.uint8)}
        parts |= {"weight.nested_absmax": scales, "weight.nested_quant_map": levels.clone()}
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset.item()}
    codes = nearest(flat / largest[:, None], table)
    numbers = (table[codes] * largest[:, None]).flatten()[: weight.numel()].view(weight.shape)
    codes = codes.flatten()[: weight.numel()]
    parts["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return parts, numbers


def eight_bits(weight: Tensor) -> tuple[Tensors, Tensor]:
    """As LLM.int8() writes it."""
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    numbers = codes.float() * (largest[:, None] / 127)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, numbers


def compressed_config(form: str) -> dict[str, Any]:
    """`quantization_config` as compressed-tensors writes it for FP4."""
    is_nvfp4 = form == "nvfp4-pack-quantized"
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 16 if is_nvfp4 else 32,
        "num_bits": 4,
        "observer": "memoryless_minmax", "observer_kwargs": {}, "strategy": "tensor_group" if is_nvfp4 else "group",
        "symmetric": True, "type": "float", "scale_dtype": "torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8",
        "zp_dtype": None,
    }  # fmt: skip
    inputs = {**weights, "dynamic": "local" if is_nvfp4 else True, "observer": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "format": form}}, "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.15.0", "global_compression_ratio": None,
    }  # fmt: skip
