"""Products grouped by expert in Triton, compiled where they run; without a GPU its interpreter runs them in tests.

A pair is a token and one of the experts that its router chose. One program per expert finds its own pairs and cuts them
into tiles. Where a tile lies follows from the pairs before it, so no program waits for another and the host for none:
of num_pairs // TILE + num_experts places some stay empty, and their programs leave at once. A pair's sums have one
order, whatever else is in its tile or in the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lora_serve.model.triton_programs import product_type  # noqa: F401 - asked of this module


@triton.jit(do_not_specialize=["num_pairs", "step", "gap"])
def sort_pairs(experts, order, tiles, num_pairs, step, gap, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (experts): experts [num_pairs] int64 -> order [num_pairs] int32, the pairs by expert, and tiles [places, 3]
    int32, which were zero: first of the order, number of pairs, expert.

    A tile that begins at n lies at place n // step + gap * expert: no two share one with step 1 and gap 0, nor with
    step TILE and gap 1.
    """
    expert = tl.program_id(0)
    first, count = 0, 0
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        chosen = tl.load(experts + pairs, mask=pairs < num_pairs, other=2147483647)
        first += tl.sum((chosen < expert).to(tl.int32), axis=0)
        count += tl.sum((chosen == expert).to(tl.int32), axis=0)
    if count > 0:
        end = first
        for start in range(0, num_pairs, BLOCK):
            pairs = start + tl.arange(0, BLOCK)
            chosen = tl.load(experts + pairs, mask=pairs < num_pairs, other=2147483647)
            own = (chosen == expert).to(tl.int32)
            tl.store(order + end + tl.cumsum(own, axis=0) - 1, pairs, mask=own > 0)
            end += tl.sum(own, axis=0)
        for begin in range(first, first + count, TILE):
            tile = tiles + (begin // step + gap * expert) * 3
            tl.store(tile, begin)
            tl.store(tile + 1, min(TILE, first + count - begin))
            tl.store(tile + 2, expert)


@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])
def multiply_tiles(
    x, x_stride, per_row, order, tiles, weight, expert_stride, out_stride, in_stride, y, in_features, out_features,
    WIDE: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (places of tiles, pieces of BLOCK_N outputs): y[i] = x[i // per_row] weight[expert of i]^T. x [rows, in],
    weight [num_experts, out, in] by its strides, y [num_pairs, out]; products in WIDE, sums in float32.
    """
    tile = tiles + tl.program_id(0) * 3
    count = tl.load(tile + 1)
    if count > 0:
        m = tl.arange(0, TILE)
        here = m < count
        pairs = tl.load(order + tl.load(tile) + m, mask=here, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < out_features
        own = weight + tl.load(tile + 2).to(tl.int64) * expert_stride
        rows = x + (pairs // per_row)[:, None] * x_stride
        total = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
        for start in range(0, in_features, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            within = k < in_features
            inputs = tl.load(rows + k[None, :], mask=here[:, None] & within[None, :], other=0.0).to(WIDE)
            places = n.to(tl.int64)[:, None] * out_stride + k[None, :] * in_stride
            weights = tl.load(own + places, mask=inside[:, None] & within[None, :], other=0.0).to(WIDE)
            total = tl.dot(inputs, tl.trans(weights), total, input_precision="tf32x3")
        place = y + pairs[:, None] * out_features + n[None, :]
        tl.store(place, total.to(y.dtype.element_ty), mask=here[:, None] & inside[None, :])
