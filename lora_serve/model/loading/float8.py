"""Weights in FP8 (e4m3) with a scale per output, and their product with inputs in FP8 with a scale per token.

    y[t, o] = a[t] * s[o] * sum_i round(x[t, i] / a[t]) * w[o, i],    a[t] = max_i |x[t, i]| / 448

Each token is rounded by itself, so that its row does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from lora_serve.model.loading.frozen_weight import FrozenWeight, StoredLinear, joined_rows, square_norms
from lora_serve.model.loading.number_type import FLOAT8

_LARGEST = torch.finfo(FLOAT8).max
_ROWS_AT_ONCE = 1024  # of a weight that is dequantised, so that no whole copy of it is made


class Float8Weight(nn.Module, FrozenWeight):
    """W [out, in] = scale * stored, by rows."""

    stored: Tensor

    def __init__(self, stored: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        """`stored` [out, in] FP8; `scale` [out, 1] float32; `dtype`: the model's own."""
        super().__init__()
        self.stored, self.scale = stored, scale
        self.out_features, self.device = len(stored), stored.device
        self.dtype = self.sum_dtype = dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        multiply = scaled_product if x.is_cuda else reference_product
        y = multiply(x.reshape(-1, x.shape[-1]), self.stored, self.scale)
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if bias is None else y + bias

    def multiply_exactly(self, x: Tensor) -> Tensor:
        return torch.cat([x.float() @ rows.t() for rows in self.dequantized()], dim=-1)

    def row_square_norms(self) -> Tensor:
        return torch.cat([square_norms(rows) for rows in self.dequantized()])

    def dequantized(self) -> Iterator[Tensor]:
        """The weight in float32, a few rows at a time."""
        for start in range(0, self.out_features, _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            yield self.stored[rows].float() * self.scale[rows]

    @classmethod
    def join(cls, weights: Sequence[Self]) -> list[Self] | None:
        stored, scales = joined_rows([one.stored for one in weights]), joined_rows([one.scale for one in weights])
        if stored is None or scales is None or len({one.dtype for one in weights}) != 1:
            return None
        return [cls(*both, weights[0].dtype) for both in zip(stored, scales, strict=True)]


class Float8Linear(StoredLinear):
    """A loaded model's layer with a weight in FP8."""

    weight_scale: Tensor

    def __init__(self, like: nn.Linear, stored: Tensor, scale: Tensor) -> None:
        """`like`: the layer in the model's own type. `stored` [out, in] FP8; `scale`: one per output, or one."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.dtype, self.bias = like.weight.dtype, like.bias
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("weight_scale", scale)  # no parameter, which an adapter might train

    @property
    def frozen_weight(self) -> Float8Weight:
        scale = self.weight_scale.float().reshape(-1, 1).expand(self.out_features, 1).contiguous()
        return Float8Weight(self.weight.detach(), scale, self.dtype)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, size] -> its numbers in FP8, and their scales [rows, 1] float32: each row by itself."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(torch.finfo(x.dtype).tiny)  # also of zeros
    return (x / scale).clamp(-_LARGEST, _LARGEST).to(FLOAT8), scale


def scaled_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [tokens, in] by `weight` [out, in] FP8 and its `scale` [out, 1] -> [tokens, out] bfloat16, on a GPU."""
    rounded, of_tokens = quantized(x)
    return torch._scaled_mm(  # noqa: SLF001
        rounded, weight.t(), scale_a=of_tokens, scale_b=scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def reference_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The function of `scaled_product` anywhere, in float32; float64 sums it exactly, so in an order like any other."""
    rounded, of_tokens = quantized(x)
    return (rounded.double() @ weight.double().t()).float() * of_tokens * scale.t()


def multiplies_float8(device: torch.device) -> bool:
    """True for GPUs since Ada and Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def can_multiply(linear: nn.Linear, device: torch.device) -> bool:
    """True if the device has a product of FP8 for such a layer: GPUs ask for multiples of 16 features."""
    return multiplies_float8(device) and linear.in_features % 16 == linear.out_features % 16 == 0
