"""A frozen weight as checkpoints pack it, whatever their format: small integers or FP8 numbers, and scales.

W[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g],    g = groups[i]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_AT_ONCE = 64  # of a weight that is dequantised, so that their float32 stays in the caches


@dataclass(frozen=True, slots=True)
class Scales:
    """The numbers beside the codes; what of them is known before any code is read."""

    scales: Tensor  # [out, num_groups], floats
    group_size: int  # inputs that share a scale, where `groups` does not say which
    zeros: Tensor | None = None  # [out, num_groups] integers; None: all are zero
    groups: Tensor | None = None  # [in] the group of each input; None: in the order of the inputs
    is_signed: bool = False  # scales may be negative

    def check(self, bits: int) -> None:
        """Raises ValueError, in words, for numbers that no packer writes."""
        if not bool((self.scales.isfinite() & (self.is_signed | (self.scales >= 0))).all()):
            raise ValueError("its scales have numbers that are negative, infinite or none")
        half = 1 << (bits - 1)
        if self.zeros is not None and not bool((self.zeros.int().add(half) // (2 * half) == 0).all()):
            raise ValueError(f"its zero points have numbers beyond {bits} bits")
        if self.groups is not None:
            low, high = int(self.groups.min()), int(self.groups.max())
            if low < 0 or high >= self.scales.shape[1]:
                raise ValueError(f"its g_idx names groups {low} to {high} of {self.scales.shape[1]}")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """W [out, in] of a linear layer, a byte a number. The kinds of frozen weights that stay packed are made of it."""

    codes: Tensor  # [out, in] int8, from -2^(bits - 1), or float8_e4m3fn
    beside: Scales

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W, computed in float32 and rounded once."""
        return CodedWeight(tuple(self.codes.shape), self._rows).dequantized(dtype)

    def _rows(self, which: slice) -> Tensor:
        numbers = self.codes[which].float()
        if self.beside.zeros is not None:
            numbers -= self._spread(self.beside.zeros[which])
        return numbers.mul_(self._spread(self.beside.scales[which]))

    def _spread(self, numbers: Tensor) -> Tensor:
        """[rows, num_groups] -> [rows, in] float32; a single group stays one column."""
        numbers, groups = numbers.float(), self.beside.groups
        if numbers.shape[1] == 1:
            return numbers
        if groups is not None:
            return numbers.index_select(1, groups)
        whole = numbers[..., None].expand(-1, -1, self.beside.group_size).flatten(1)
        return whole[:, : self.codes.shape[1]]


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """W [out, in] of a format whose numbers are no integers times scales: nothing keeps it packed."""

    shape: tuple[int, ...]
    rows: Callable[[slice], Tensor]  # some of W in float32

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W, computed in float32 and rounded once."""
        found = torch.empty(self.shape, dtype=dtype)
        for start in range(0, len(found), _ROWS_AT_ONCE):
            which = slice(start, min(start + _ROWS_AT_ONCE, len(found)))
            found[which] = self.rows(which)
        return found


def unpacked(words: Tensor, bits: int) -> Tensor:
    """words [rows, n] int32 -> the integers of 2, 4 or 8 bits that lie in each, from its lowest bits up, and of each
    2^(bits - 1) less: [rows, n * 32 / bits] int8.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    numbers = (words.flatten().view(torch.uint8)[:, None] >> shifts) & ((1 << bits) - 1)
    return numbers.view(len(words), -1).sub_(1 << (bits - 1)).view(torch.int8)  # bytes wrap, as two's complement does


def packed(numbers: Tensor, bits: int) -> Tensor:
    """numbers [rows, n] int8 of 4 or 8 bits -> words [rows, ceil(n * bits / 32)] int32; `unpacked` reverses it."""
    count = 32 // bits
    found = torch.zeros(len(numbers), -(-numbers.shape[1] // count) * count, dtype=torch.uint8)
    found[:, : numbers.shape[1]] = numbers.view(torch.uint8) + (1 << (bits - 1))  # bytes wrap
    if bits == 4:
        found = found[:, ::2] | found[:, 1::2] << 4
    return found.contiguous().view(torch.int32)
