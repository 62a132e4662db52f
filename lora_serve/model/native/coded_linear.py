"""Weights of small integers or FP8 numbers with scales, in panels as they are packed; see `codes.h`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.native import library
from lora_serve.model.native.operators import PackedLinear, alone

_ADDRESS, _SIZE = library.ADDRESS, library.SIZE
_LONGEST = 1024  # places of a group; longer ones are cut, see CODE_DEPTH
_PANELS_AT_ONCE = 32  # that are laid out, or read back
_FULL = 2  # times a weight's own depth: most places that may be filled up
_MAX_ZERO, _NIBBLE = 127, 7


class Form(IntEnum):
    """How codes lie in a panel; `tile.h` has them in this order."""

    NIBBLES = 4
    BYTES = 5
    FLOAT8S = 6


_SCALES = (torch.float16, torch.bfloat16, torch.float32)  # in the order of `codes.h`


@dataclass(frozen=True, slots=True)
class CodedLinear(PackedLinear):
    """W [out, in] = (codes - zeros) * scales, and the function that multiplies by it."""

    input_dtype: torch.dtype
    group: int  # places of depth that share a scale
    depth: int  # places of all
    order: Tensor | None  # [depth] int32, the input of each place, -1: none; None: all in their order

    @property
    def dtype(self) -> torch.dtype:
        return self.input_dtype

    @property
    def likeness(self) -> Any:
        order = None if self.order is None else self.order.numpy().tobytes()
        return self.kind, self.in_features, self.dtype, self.group, self.depth, order

    @property
    def places(self) -> tuple[int, int, int | None]:
        return self.group, self.depth, None if self.order is None else self.order.data_ptr()

    def dense(self) -> Tensor:
        """W as a plain tensor [out, in] of the inputs' type: dequantised."""
        return torch.cat(list(self.dequantized())).to(self.dtype)

    def dequantized(self) -> Iterator[Tensor]:
        """W in float32, some rows at a time."""
        left = self.out_features
        for start in range(0, len(self.panels), _PANELS_AT_ONCE):
            rows = self._rows(self.panels[start : start + _PANELS_AT_ONCE])[:left]
            left -= len(rows)
            if self.order is None:
                yield rows
                continue
            is_input = self.order >= 0
            found = rows.new_zeros(len(rows), self.in_features)
            found[:, self.order[is_input].long()] = rows[:, is_input]
            yield found

    def _rows(self, panels: Tensor) -> Tensor:
        """Panels -> their outputs [rows, depth], dequantised."""
        form, scale_dtype, has_zeros = Form(self.kind & 15), _SCALES[self.kind >> 4 & 3], bool(self.kind >> 6)
        codes, scales, zeros = _parts(panels, form, scale_dtype, self.depth, self.group, self.panel_outputs)
        if form is Form.NIBBLES:
            pairs = codes.contiguous().view(torch.int8)
            halves = torch.stack([pairs << 4, pairs], -1) >> 4
            numbers = (
                halves.view(len(panels), -1, self.panel_outputs, 2, 4).permute(0, 2, 1, 4, 3).reshape(-1, self.depth)
            )
        else:
            dtype = torch.float8_e4m3fn if form is Form.FLOAT8S else torch.int8
            numbers = codes.transpose(1, 2).contiguous().view(dtype).view(-1, self.depth)
        pieces = torch.arange(self.depth) // self.group
        found = numbers.float()
        if has_zeros:
            found -= zeros.transpose(1, 2).reshape(len(found), -1).float()[:, pieces]
        return found * scales.transpose(1, 2).reshape(len(found), -1).float()[:, pieces]


def code(codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor, dtype: torch.dtype) -> CodedLinear | None:
    """Lays out W [out, in] = (codes - zeros[:, groups]) * scales[:, groups] for inputs of `dtype`.

    codes int8, or e4m3 without NaN; scales, zeros [out, num_groups]; groups [in]. None: panels have no room for its
    numbers. Raises OSError.
    """
    kernels = _kernels(dtype)
    outputs, unit = kernels.panel_outputs(), kernels.code_unit()
    if zeros is not None and not bool((zeros.int().abs() <= _MAX_ZERO + (zeros < 0)).all()):
        return None
    (num_outputs, num_inputs), num_groups = codes.shape, scales.shape[1]
    counts = groups.bincount(minlength=num_groups)
    parts = -(-int(counts.max()) // _LONGEST)
    piece = _up_to(-(-int(counts.max()) // parts), unit)
    depth = (num_groups - 1) * piece * parts + _up_to(int(counts[-1]), unit)
    if depth > _FULL * _up_to(num_inputs, unit) * max(1, unit // 8):
        return None
    by_group = groups.argsort(stable=True)
    first = counts.cumsum(0) - counts
    place = groups[by_group] * piece * parts + torch.arange(num_inputs) - first[groups[by_group]]
    order: Tensor | None = torch.full((depth,), -1, dtype=torch.int32)
    assert order is not None
    order[place] = by_group.int()
    if torch.equal(order, torch.arange(depth, dtype=torch.int32)[:num_inputs]):
        order = None
    form, scales = _form(codes), _narrowed(scales)
    kind = form | _SCALES.index(scales.dtype) << 4 | (zeros is not None) << 6
    count = -(-num_outputs // outputs)
    panels = alone((count, kernels.words_of_codes(kind, depth, piece)), torch.int32)
    which = torch.arange(-(-depth // piece)) // parts
    for start in range(0, count, _PANELS_AT_ONCE):
        own = panels[start : start + _PANELS_AT_ONCE]
        rows = slice(start * outputs, (start + len(own)) * outputs)
        numbers = codes[rows].view(torch.int8)
        if order is not None:
            numbers = numbers.new_zeros(len(numbers), depth).index_copy_(1, place, numbers[:, by_group])
        to_codes, to_scales, to_zeros = _parts(own, form, scales.dtype, depth, piece, outputs)
        to_codes.copy_(_laid_out(_filled(numbers, len(own) * outputs), form, outputs))
        to_scales.copy_(_turned(_filled(scales[rows], len(own) * outputs)[:, which], outputs))
        if zeros is not None:
            to_zeros.copy_(_turned(_filled(zeros[rows], len(own) * outputs)[:, which], outputs))
    return CodedLinear(
        panels, kind, num_inputs, num_outputs, outputs, kernels.coded_linear, dtype, piece, depth, order
    )  # fmt: skip


def _up_to(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _form(codes: Tensor) -> Form:
    if codes.is_floating_point():
        return Form.FLOAT8S
    low, high = (int(one) for one in codes.aminmax())
    return Form.NIBBLES if low >= -_NIBBLE - 1 and high <= _NIBBLE else Form.BYTES


def _narrowed(scales: Tensor) -> Tensor:
    """The same numbers in two bytes each, if they have room."""
    for dtype in (torch.float16, torch.bfloat16):
        if scales.dtype == dtype or torch.equal(scales.to(dtype).float(), scales.float()):
            return scales.to(dtype)
    return scales.float()


def _filled(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])])


def _turned(rows: Tensor, outputs: int) -> Tensor:
    """[panels * outputs, n] -> [panels, n, outputs]."""
    return rows.view(-1, outputs, rows.shape[1]).transpose(1, 2)


def _laid_out(codes: Tensor, form: Form, outputs: int) -> Tensor:
    """Bytes [rows, depth] -> those of panels, [panels, n, outputs] words or bytes."""
    if form is Form.BYTES:
        return _turned(codes, outputs)
    if form is Form.FLOAT8S:
        return _turned(codes.contiguous().view(torch.int16), outputs)
    pairs = codes.reshape(
        len(codes), -1, 2, 2, 2
    )  # of four pairs of neighbours: [rows, depth / 8, place / 2, place, which]
    byte = (pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)
    words = byte.transpose(2, 3).flatten(2).view(torch.int32).flatten(1)
    return _turned(words, outputs)


def _parts(
    panels: Tensor, form: Form, scale: torch.dtype, depth: int, group: int, outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of panels [count, words], as views; the last mean nothing where there are none."""
    raw, pieces = panels.view(torch.int8), -(-depth // group)
    end = depth * outputs // (2 if form is Form.NIBBLES else 1)
    after = end + pieces * outputs * scale.itemsize
    words = {Form.NIBBLES: torch.int32, Form.BYTES: torch.int8, Form.FLOAT8S: torch.int16}[form]
    count = len(panels)
    codes = raw[:, :end].view(words).view(count, -1, outputs)
    scales = raw[:, end:after].view(scale).view(count, pieces, outputs)
    zeros = raw[:, after : after + pieces * outputs]
    return codes, scales, zeros.view(count, pieces, outputs) if zeros.shape[1] == pieces * outputs else zeros


def _kernels(dtype: torch.dtype) -> Any:
    kernels = library.load(dtype)
    kernels.coded_linear.argtypes = [
        _ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS
    ]  # fmt: skip
    kernels.coded_linear.restype = None
    kernels.words_of_codes.argtypes, kernels.words_of_codes.restype = [_SIZE, _SIZE, _SIZE], _SIZE
    kernels.panel_outputs.restype = kernels.code_unit.restype = _SIZE
    return kernels
