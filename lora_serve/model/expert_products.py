"""Products of tokens and their experts, as operators of torch: launches of the programs of `triton_experts`.

They read what lies on the device alone, and their sizes follow from the number of pairs: captured graphs may hold them,
and torch's compiler takes them as they are.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.paged_attention import covering

TILE = 16  # pairs of one matrix product
_SORTED = 1024  # pairs that a program looks at, at a time
_OUTPUTS, _INPUT_BYTES = 64, 256  # of one matrix product
_STAGES = 3  # products whose inputs are on their way at once
OPERATORS: Any = torch.ops.lora_serve  # `sort_pairs` and `multiply_pairs`, as of `_sort_pairs` and `_multiply_pairs`
_library: Any = torch.library.Library("lora_serve", "FRAGMENT")  # type: ignore[no-untyped-call]


def _sort_pairs(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """experts [pairs] int64 -> the pairs by expert and their tiles, see `triton_experts.sort_pairs`."""
    num_pairs = len(experts)
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.zeros(num_pairs // TILE + num_experts, 3, dtype=torch.int32, device=experts.device)
    step, gap = (1, 0) if num_pairs <= len(tiles) else (TILE, 1)
    _programs().sort_pairs[num_experts,](experts, order, tiles, num_pairs, step, gap, TILE=TILE, BLOCK=_SORTED)
    return order, tiles


def _multiply_pairs(x: Tensor, weight: Tensor, order: Tensor, tiles: Tensor, per_row: int) -> Tensor:
    """y[i] = x[i // per_row] weight[expert of i]^T: x [pairs // per_row, in], weight [num_experts, out, in] -> [pairs,
    out].
    """
    x, programs = x.contiguous(), _programs()
    out_features, in_features = weight.shape[1:]
    y = torch.empty(len(order), out_features, dtype=x.dtype, device=x.device)
    outputs, inputs = min(covering(out_features), _OUTPUTS), min(covering(in_features), _INPUT_BYTES // x.itemsize)
    grid = (min(len(order), len(tiles)), -(-out_features // outputs))
    programs.multiply_tiles[grid](
        x, x.stride(0), per_row, order, tiles, weight, *weight.stride(), y, in_features, out_features,
        WIDE=programs.product_type(x, weight.dtype), TILE=TILE, BLOCK_N=outputs, BLOCK_K=inputs, num_stages=_STAGES,
    )  # fmt: skip
    return y


def _programs() -> Any:
    """Imported at the first use: a machine without Triton has this file too."""
    return importlib.import_module("lora_serve.model.triton_experts")


def _like_sorted(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    order = experts.new_empty(experts.shape, dtype=torch.int32)
    return order, experts.new_empty(experts.shape[0] // TILE + num_experts, 3, dtype=torch.int32)


def _like_multiplied(x: Tensor, weight: Tensor, order: Tensor, *_: object) -> Tensor:
    return x.new_empty(order.shape[0], weight.shape[1])


_library.define("sort_pairs(Tensor experts, int num_experts) -> (Tensor, Tensor)")
_library.define("multiply_pairs(Tensor x, Tensor weight, Tensor order, Tensor tiles, int per_row) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("sort_pairs", _sort_pairs, _device)
    _library.impl("multiply_pairs", _multiply_pairs, _device)
torch.library.register_fake("lora_serve::sort_pairs", _like_sorted, lib=_library)
torch.library.register_fake("lora_serve::multiply_pairs", _like_multiplied, lib=_library)
