"""The form in which K and V lie in the pool: numbers of the model's type, or codes of one byte beside their scale.

A row, of one token and head, has a scale of its own. A block's would change as tokens come, so that a token's numbers
would depend on how its prompt is cut and on who wrote the block before. `native/kv_codes.h` is the same in C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SCALE_BYTES = torch.float32.itemsize
_SMALLEST_ROW = 1e-30  # a row of no larger numbers is zero
_SMALLEST_NORMAL = 2.0**-6  # of e4m3; no code is a smaller number but 0, which kernels need not tell from others


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`codes` None: rows are numbers of the model's type."""

    name: str  # a value of --kv-cache-dtype
    number: int  # in C and Triton
    codes: torch.dtype | None = None
    largest: float = math.inf  # code

    def row_type(self, dtype: torch.dtype) -> torch.dtype:
        """The type of a pool's elements, for a model of `dtype`."""
        return dtype if self.codes is None else torch.uint8

    def width(self, head_dim: int) -> int:
        """Elements of a row: numbers, or codes up to a whole word and a float32 scale."""
        return head_dim if self.codes is None else (-(-head_dim // _SCALE_BYTES) + 1) * _SCALE_BYTES

    def encode(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """numbers [..., head_dim] -> rows [..., width]. A row that holds NaN or infinity has the scale NaN."""
        if self.codes is None:
            return numbers.to(dtype)
        wide = numbers.float()
        largest = wide.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > _SMALLEST_ROW, largest / self.largest, 1.0)
        scale = torch.where(largest.isfinite(), scale, math.nan)
        codes = wide / scale
        if self.codes is torch.int8:
            codes = codes.round()
        else:
            whole = (codes / _SMALLEST_NORMAL).round() * _SMALLEST_NORMAL
            codes = torch.where(codes.abs() < _SMALLEST_NORMAL, whole, codes)
        rows = numbers.new_zeros(*numbers.shape[:-1], self.width(numbers.shape[-1]), dtype=torch.uint8)
        rows[..., : numbers.shape[-1]] = codes.to(self.codes).view(torch.uint8)
        rows[..., -_SCALE_BYTES:] = scale.view(torch.uint8)
        return rows

    def decode(self, rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """rows [..., width] -> the numbers that they stand for, rounded to `dtype` [..., head_dim]."""
        if self.codes is None:
            return rows
        codes, scale = rows[..., :head_dim], rows[..., -_SCALE_BYTES:]
        return (codes.view(self.codes).float() * scale.contiguous().view(torch.float32)).to(dtype)


PLAIN = KVFormat("auto", 0)
FORMATS = {
    form.name: form
    for form in (PLAIN, KVFormat("int8", 1, torch.int8, 127.0), KVFormat("fp8_e4m3", 2, torch.float8_e4m3fn, 448.0))
}
