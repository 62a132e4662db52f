"""The LoRA delta in Triton, over device records: decode rows one by one, long segments in tiles. For CUDA.

Tests without a GPU run it in Triton's interpreter (TRITON_INTERPRET=1), which takes tensors of the CPU. Block sizes
depend on a layer's sizes alone, not on what is loaded or on a tuning run: a layer that warm-up has met compiles nothing
later. They were chosen on an H200 (benchmarks/gpu_tiles.py measures those of tiles).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.lora.host_adapter import WEIGHT_TYPES
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import TILE_TOKENS, DeviceTokens, LoraTokens

PREFERENCE = 0 if os.environ.get("TRITON_INTERPRET") == "1" else 3  # the interpreter is for tests
_ROW_RANKS, _ROW_INPUTS, _ROW_OUTPUTS = 16, 1024, 256  # of one program of a single token
_SHRINK_WARPS = 4
_EXPAND_WARPS = 1  # so each thread adds up all ranks of its outputs by itself
_TILE_RANKS, _TILE_INPUTS, _TILE_OUTPUTS = 32, 64, 128  # of one matrix product of a tile
_TILE_PART = 2048  # inputs of one program, which takes _TILE_INPUTS at a time
_SHRINK_TILE_STAGES = 4  # products whose inputs are on their way at once
_EXPAND_TILE_WARPS = 4
_MIN_BLOCK = 16  # of a matrix product
_ALIGNED_FEATURES = 8  # 16 bytes of bfloat16


def why_not(slots: LoraSlots) -> str | None:
    """The reason why the kernel cannot serve `slots`; None: it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if slots.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton compiles for GPUs, not for {slots.device.type}"
    return None


class Kernel:
    """Launches read memory that stays in place while no slot is added, so captured graphs may hold them."""

    reads_device_tokens = True

    def __init__(self, slots: LoraSlots) -> None:
        # imported here: a machine without Triton has this file too
        self._programs: Any = importlib.import_module("lora_serve.model.triton_programs")
        self._slots = slots
        self._records = slots.device_records()
        self._groups: dict[tuple[int, ...], _Group] = {}  # by the modules' numbers
        self._met: set[tuple[int, ...]] = set()  # those that had tiles

    def add(self, y: Tensor, x: Tensor, modules: tuple[int, ...], tokens: LoraTokens) -> None:
        placed = tokens.on_device or tokens.placed(x.device).on_device
        assert placed is not None
        group = self._group(y, x, modules)
        if placed.end_of_short and self._slots.touches(group.bits, placed.short_slots):
            self._add_rows(y, x, group, placed.slots, placed.scales, placed.end_of_short)
        if len(placed.tiles):
            self._add_tiles(y, x, group, placed)

    def add_pairs(self, y: Tensor, x: Tensor, module: int, slots: Tensor, scales: Tensor, experts: Tensor) -> None:
        pairs = {"experts": experts, "per_row": len(experts) // len(x)}
        self._add_rows(y, x, self._group(y, x, (module,)), slots, scales, len(experts), pairs)

    def _group(self, y: Tensor, x: Tensor, modules: tuple[int, ...]) -> _Group:
        assert x.stride(-1) == y.stride(-1) == 1, "features lie side by side"
        group = self._groups.get(modules)
        if group is None:
            out_features = [self._slots.shapes[module].out_features for module in modules]
            group = self._groups[modules] = _Group.of(modules, out_features, x.device)
        assert y.shape[1] == group.width
        return group

    def _add_rows(
        self, y: Tensor, x: Tensor, group: _Group, slots: Tensor, scales: Tensor, num_tokens: int, pairs: Any = None
    ) -> None:
        pairs = pairs or {"experts": None, "per_row": 1}
        records, rank = self._records.tensor, self._slots.max_rank
        width, size, in_features = _width(rank), len(group.modules), x.shape[1]
        inputs = _block(in_features, _ROW_INPUTS)
        parts = _pieces(in_features, inputs)
        hidden = torch.empty(num_tokens, size, parts, width, dtype=torch.float32, device=x.device)
        if rank:
            self._programs.shrink_rows[num_tokens, parts, size * _pieces(rank, _ROW_RANKS)](
                x, x.stride(0), slots, records, hidden, width, in_features, group.modules, size,
                records.shape[1], BLOCK_R=_ROW_RANKS, BLOCK_K=inputs, ALIGNED=_is_aligned(in_features),
                **pairs, num_warps=_SHRINK_WARPS,
            )  # fmt: skip
        self._programs.expand_rows[num_tokens, len(group.row_pieces)](
            y, y.stride(0), slots, scales, records, hidden, parts, width, group.row_pieces, size,
            records.shape[1], MAX_PARTS=_power_of_two(parts), BLOCK_R=_ROW_RANKS, BLOCK_N=group.row_outputs,
            ALIGNED=group.is_aligned, experts=pairs["experts"], num_warps=_EXPAND_WARPS,
        )  # fmt: skip

    def _add_tiles(self, y: Tensor, x: Tensor, group: _Group, tokens: DeviceTokens) -> None:
        records, rank = self._records.tensor, self._slots.max_rank
        width, size, in_features, num_tiles = _width(rank), len(group.modules), x.shape[1], len(tokens.tiles)
        parts = _pieces(in_features, _TILE_PART)
        hidden = torch.empty(len(x), size, parts, width, dtype=torch.float32, device=x.device)
        for own in self._types(group, tokens.tile_slots):
            dtype, wide = self._programs.type_of(own), self._programs.product_type(x, own)
            if rank:
                self._programs.shrink_tiles[num_tiles, parts, size * _pieces(rank, _TILE_RANKS)](
                    x, x.stride(0), tokens.tiles, records, hidden, width, in_features, group.modules, size,
                    records.shape[1], DTYPE=dtype, WIDE=wide, BLOCK_M=TILE_TOKENS, BLOCK_R=_TILE_RANKS,
                    BLOCK_K=_TILE_INPUTS, PART=_TILE_PART, ALIGNED=_is_aligned(in_features),
                    num_stages=_SHRINK_TILE_STAGES,
                )  # fmt: skip
            self._programs.expand_tiles[num_tiles, len(group.tile_pieces)](
                y, y.stride(0), tokens.tiles, tokens.tile_scales, records, hidden, parts, width, group.tile_pieces,
                size, records.shape[1], DTYPE=dtype, WIDE=wide, BLOCK_M=TILE_TOKENS, BLOCK_R=_TILE_RANKS,
                BLOCK_N=group.tile_outputs, ALIGNED=group.is_aligned, num_warps=_EXPAND_TILE_WARPS,
            )  # fmt: skip

    def _types(self, group: _Group, slots: frozenset[int] | None) -> set[torch.dtype]:
        """The types of weights that these slots have in a group's layers: each has its own program, so that neither
        takes the other's registers, and a slot's sums have one order whatever the others hold. All of them when the
        group is first met: later no tenant waits for the compiler.
        """
        if self._slots.max_rank and group.numbers not in self._met:
            self._met.add(group.numbers)
            return set(WEIGHT_TYPES)
        return {dtype for dtype, modules in self._slots.touched(slots).items() if modules & group.bits}


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers of one input as the programs find them: all that follows from the layers' numbers and sizes."""

    numbers: tuple[int, ...]  # the modules
    bits: int  # the same, a bit each
    width: int  # columns of y
    modules: Tensor  # [group_size] int32
    row_outputs: int  # of each piece
    row_pieces: Tensor  # [num_pieces, 5] int32
    tile_outputs: int
    tile_pieces: Tensor
    is_aligned: bool  # so are the layers' first columns

    @staticmethod
    def of(numbers: tuple[int, ...], out_features: Sequence[int], device: torch.device) -> _Group:
        row_outputs, tile_outputs = (_block(max(out_features), most) for most in (_ROW_OUTPUTS, _TILE_OUTPUTS))
        modules, row_pieces, tile_pieces = (
            torch.tensor(numbers_of_each, dtype=torch.int32, device=device)
            for numbers_of_each in (
                numbers, _cut(numbers, out_features, row_outputs), _cut(numbers, out_features, tile_outputs)
            )
        )  # fmt: skip
        is_aligned = all(map(_is_aligned, out_features))
        return _Group(
            numbers,
            sum(1 << number for number in numbers),
            sum(out_features),
            modules,
            row_outputs,
            row_pieces,
            tile_outputs,
            tile_pieces,
            is_aligned,
        )


def _cut(numbers: Sequence[int], out_features: Sequence[int], outputs: int) -> list[tuple[int, ...]]:
    """The layers' outputs in pieces of `outputs` at most, see `triton_programs`."""
    found: list[tuple[int, ...]] = []
    column = 0
    for place, (number, size) in enumerate(zip(numbers, out_features, strict=True)):
        found += [(number, place, first, size, column + first) for first in range(0, size, outputs)]
        column += size
    return found


def _width(rank: int) -> int:
    """Of what lies between shrink and expand. Whatever is loaded it is a multiple of 16: for other widths Triton
    compiles anew, with sums in another order.
    """
    return max(rank, _MIN_BLOCK)


def _pieces(size: int, block: int) -> int:
    return -(-size // block)


def _block(size: int, most: int) -> int:
    """A power of two that covers `size`, from what a matrix product needs to `most`."""
    return max(_MIN_BLOCK, min(most, _power_of_two(size)))


def _power_of_two(number: int) -> int:
    """The first that is not less than `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def _is_aligned(features: int) -> bool:
    """True if every row of a matrix with so many columns begins where 16 bytes can be loaded at once."""
    return features % _ALIGNED_FEATURES == 0
