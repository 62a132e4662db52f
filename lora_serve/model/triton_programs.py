"""GPU kernels in Triton, compiled where they run; without a GPU its interpreter runs them in tests.

LoRA, for every token i with a slot s in a layer m (Punica, arXiv 2310.18547: BGMV for tokens, SGMV for segments):

    shrink   h[i, m] = x[i] A[s, m]^T                                         [rank of s], float32
    expand   y[i, m] = gain[s, m] * y[i, m] + t[i] * (shift[s, m] + scale[s, m] * h[i, m] B[s, m])

Each slot has its true rank: programs beyond it leave at once. Weights are reached through the records of
`SlotRecords` (a, b, gain, shift as addresses, then rank, scale and whether a and b are bfloat16), so a slot's new owner
needs no new launch. In rows every sum has one order, whatever else is in the batch or loaded: no atomics, and where a
token's inputs are cut into parts, their number follows from the layer alone; so in tiles. (Neighbours of one adapter
are one segment: together they may be long enough for tiles, which round h.) A token is only ever multiplied with its
own slot's weights, so one that is not a number stays alone.

The layers m of a group read the same x, and their outputs lie side by side in y: one launch of each program serves
them all. `modules` [num_modules of the group] int32 are their numbers; `pieces` [num_pieces, 5] int32 cut their outputs
so that each piece is in one layer: the layer's number, its place in the group, the piece's first output, the layer's
out_features, the piece's first column of y. Both follow from the layers alone, and so does the order of every sum.

A stack of experts' weights has one record a slot, with the addresses of A [num_experts, rank, in] and B [num_experts,
rank, out]. In place of tokens there are then pairs of a token and its expert; `experts` [num_pairs] int64 says which.

What differs from step to step is not specialised, nor is how many layers a group has: for each kind of number (a
multiple of 16, 1, another one) Triton would compile once more, and every tenant would wait for seconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def type_of(dtype):
    """Triton's word for a type of torch."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def product_type(x, other):
    """The type that holds x's numbers and those of the type `other`; float32 where the interpreter has no product."""
    wide = torch.promote_types(x.dtype, other)
    return type_of(torch.float32 if wide == torch.bfloat16 and not x.is_cuda else wide)


@triton.jit
def _record(table, slot, module, num_modules):
    """Where the record of a slot's layer begins: 8 words of 64 bits."""
    return table + (slot.to(tl.int64) * num_modules + module) * 8


@triton.jit
def _piece(pieces, ALIGNED: tl.constexpr):
    """A program's piece of the outputs: its layer, the layer's place in the group, and as numbers in whole vectors if
    ALIGNED its first output, the layer's out_features, its first column of y.
    """
    own = pieces + tl.program_id(1) * 5
    first = tl.load(own + 2)
    out_features = tl.load(own + 3)
    column = tl.load(own + 4)
    if ALIGNED:  # without this word the compiler loads and stores one element at a time
        first = tl.multiple_of(first, 8)
        out_features = tl.multiple_of(out_features, 8)
        column = tl.multiple_of(column, 8)
    return tl.load(own), tl.load(own + 1), first, out_features, column


@triton.jit
def _scale_of(record):
    return tl.load(record + 5).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _is_of(record, address, dtype: tl.constexpr):
    """True for weights of a type; a layer that has none counts as bfloat16."""
    return ((address == 0) | (tl.load(record + 6) != 0)) == (dtype == tl.bfloat16)


@triton.jit
def _of_expert(record, address, experts, pair, size):
    """The address of the matrix of a pair's expert, in a stack of matrices of `size` numbers."""
    return address + tl.load(experts + pair) * size * tl.where(tl.load(record + 6) != 0, 2, 4)


@triton.jit
def _weights(address, rows, columns, rank, width, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements (rows[:, None], columns[None, :]) of a matrix [rank, width] at an address; 0 beyond it."""
    pointers = address.to(tl.pointer_type(dtype)) + rows[:, None].to(tl.int64) * width + columns[None, :]
    if ALIGNED:  # without this word the compiler loads one element at a time through an address it cannot see into
        pointers = tl.multiple_of(pointers, [16, 16])
    return tl.load(pointers, mask=(rows < rank)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _vector(address, columns, mask, other: tl.constexpr):
    return tl.load(address.to(tl.pointer_type(tl.float32)) + columns, mask=mask, other=other)


@triton.jit
def _shrunk_part(x, a, r, k, rank, in_features, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    inside = k < in_features
    inputs = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    weights = _weights(a, r, k, rank, in_features, dtype, ALIGNED)
    return tl.sum(weights.to(tl.float32) * inputs[None, :], axis=1)


@triton.jit(do_not_specialize=["group_size"], do_not_specialize_on_alignment=["slots"])
def shrink_rows(
    x, x_stride, slots, table, h, width, in_features, modules, group_size, num_modules,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr, experts=None, per_row=1,
):  # fmt: skip
    """Grid (tokens, parts of BLOCK_K inputs, group_size times pieces of BLOCK_R ranks): x [num_tokens, in] -> h
    [num_tokens, group_size, parts, width] float32. Each program loads all its weights at once: one row alone, too,
    keeps the memory busy. With `experts` see above; x then has a row for `per_row` pairs.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        layer = tl.program_id(2) % group_size
        record = _record(table, slot, tl.load(modules + layer), num_modules)
        a = tl.load(record)
        rank = tl.load(record + 4).to(tl.int32)
        first = tl.program_id(2) // group_size * BLOCK_R
        if (a != 0) & (first < rank):
            r = first + tl.arange(0, BLOCK_R)
            k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
            if experts is not None:
                a = _of_expert(record, a, experts, token, rank * in_features)
                row = x + token // per_row * x_stride
            else:
                row = x + token * x_stride
            if tl.load(record + 6) != 0:
                total = _shrunk_part(row, a, r, k, rank, in_features, tl.bfloat16, ALIGNED)
            else:
                total = _shrunk_part(row, a, r, k, rank, in_features, tl.float32, ALIGNED)
            place = (token * group_size + layer) * tl.num_programs(1) + tl.program_id(1)
            tl.store(h + place * width + r, total, mask=r < rank)


@triton.jit
def _expanded_row(
    h, parts, width, b, n, rank, out_features,
    dtype: tl.constexpr, MAX_PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    part = tl.arange(0, MAX_PARTS)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (part < parts)[:, None] & (r < rank)[None, :]
        inputs = tl.sum(tl.load(h + part[:, None] * width + r[None, :], mask=mask, other=0.0), axis=0)
        weights = _weights(b, r, n, rank, out_features, dtype, ALIGNED)
        total += tl.sum(weights.to(tl.float32) * inputs[:, None], axis=0)
    return total


@triton.jit(do_not_specialize=["group_size"], do_not_specialize_on_alignment=["slots", "scales"])
def expand_rows(
    y, y_stride, slots, scales, table, h, parts, width, pieces, group_size, num_modules,
    MAX_PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, experts=None,
):  # fmt: skip
    """Grid (tokens, pieces of BLOCK_N outputs): y [num_tokens, sum of out] in place; h [num_tokens, group_size, parts,
    width]. With `experts` see above.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    module, layer, begin, out_features, column = _piece(pieces, ALIGNED)
    if slot >= 0:
        record = _record(table, slot, module, num_modules)
        b = tl.load(record + 1)
        gain = tl.load(record + 2)
        shift = tl.load(record + 3)
        if (b != 0) | (gain != 0) | (shift != 0):
            n = begin + tl.arange(0, BLOCK_N)
            inside = n < out_features
            place = y + token * y_stride + column + tl.arange(0, BLOCK_N)
            found = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            delta = tl.zeros([BLOCK_N], dtype=tl.float32)
            if gain != 0:
                found *= _vector(gain, n, inside, 0.0)
            if shift != 0:
                delta += _vector(shift, n, inside, 0.0)
            if b != 0:
                rank = tl.load(record + 4).to(tl.int32)
                if experts is not None:
                    b = _of_expert(record, b, experts, token, rank * out_features)
                row = h + (token * group_size + layer) * parts * width
                if tl.load(record + 6) != 0:
                    total = _expanded_row(
                        row, parts, width, b, n, rank, out_features, tl.bfloat16, MAX_PARTS, BLOCK_R, BLOCK_N, ALIGNED
                    )
                else:
                    total = _expanded_row(
                        row, parts, width, b, n, rank, out_features, tl.float32, MAX_PARTS, BLOCK_R, BLOCK_N, ALIGNED
                    )
                delta += _scale_of(record) * total
            found += tl.load(scales + token) * delta
            tl.store(place, found.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["group_size"], do_not_specialize_on_alignment=["tiles"])
def shrink_tiles(
    x, x_stride, tiles, table, h, width, in_features, modules, group_size, num_modules,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PART: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens of one slot, parts of PART inputs, group_size times pieces of BLOCK_R ranks): x
    [num_tokens, in] -> h [num_tokens, group_size, parts, width] float32. Only layers whose weights in the slot are of
    DTYPE; products in WIDE.
    """
    tile = tiles + tl.program_id(0) * 3
    layer = tl.program_id(2) % group_size
    record = _record(table, tl.load(tile + 2), tl.load(modules + layer), num_modules)
    a = tl.load(record)
    rank = tl.load(record + 4).to(tl.int32)
    first = tl.program_id(2) // group_size * BLOCK_R
    if (tl.load(tile + 1) > 0) & (a != 0) & (first < rank) & _is_of(record, a, DTYPE):
        m = tl.arange(0, BLOCK_M)
        here = m < tl.load(tile + 1)
        tokens = (tl.load(tile) + m).to(tl.int64)
        r = first + tl.arange(0, BLOCK_R)
        part = tl.program_id(1)
        total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for start in range(part * PART, min(part * PART + PART, in_features), BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            mask = here[:, None] & (k < in_features)[None, :]
            inputs = tl.load(x + tokens[:, None] * x_stride + k[None, :], mask=mask, other=0.0).to(WIDE)
            weights = _weights(a, r, k, rank, in_features, DTYPE, ALIGNED).to(WIDE)
            total = tl.dot(inputs, tl.trans(weights), total, input_precision="tf32x3")
        place = ((tokens * group_size + layer) * tl.num_programs(1) + part) * width
        tl.store(h + place[:, None] + r[None, :], total, mask=here[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["group_size"], do_not_specialize_on_alignment=["tiles", "scales"])
def expand_tiles(
    y, y_stride, tiles, scales, table, h, parts, width, pieces, group_size, num_modules,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens of one slot, pieces of BLOCK_N outputs): y [num_tokens, sum of out] in place; h
    [num_tokens, group_size, parts, width]. Only layers whose weights in the slot are of DTYPE; products in WIDE.
    """
    tile = tiles + tl.program_id(0) * 3
    module, layer, begin, out_features, column = _piece(pieces, ALIGNED)
    record = _record(table, tl.load(tile + 2), module, num_modules)
    b = tl.load(record + 1)
    gain = tl.load(record + 2)
    shift = tl.load(record + 3)
    if (tl.load(tile + 1) > 0) & ((b != 0) | (gain != 0) | (shift != 0)) & _is_of(record, b, DTYPE):
        m = tl.arange(0, BLOCK_M)
        here = m < tl.load(tile + 1)
        tokens = (tl.load(tile) + m).to(tl.int64)
        n = begin + tl.arange(0, BLOCK_N)
        inside = n < out_features
        rank = tl.where(b != 0, tl.load(record + 4), 0).to(tl.int32)
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, rank, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            mask = here[:, None] & (r < rank)[None, :]
            inputs = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
            for part in range(parts):
                row = ((tokens * group_size + layer) * parts + part) * width
                inputs += tl.load(h + row[:, None] + r[None, :], mask=mask, other=0.0)
            weights = _weights(b, r, n, rank, out_features, DTYPE, ALIGNED).to(WIDE)
            total = tl.dot(inputs.to(WIDE), weights, total, input_precision="tf32x3")
        # y only comes now: beside the products there would not be registers enough
        delta = _scale_of(record) * total + _vector(shift, n, inside & (shift != 0), 0.0)[None, :]
        place = y + tokens[:, None] * y_stride + (column + tl.arange(0, BLOCK_N))[None, :]
        within = here[:, None] & inside[None, :]
        found = tl.load(place, mask=within, other=0.0).to(tl.float32) * _vector(gain, n, inside & (gain != 0), 1.0)
        found += tl.load(scales + tl.program_id(0)) * delta
        tl.store(place, found.to(y.dtype.element_ty), mask=within)
