"""Decode attention that reads K and V where they lie in the paged cache.

Flash-Decoding (Dao et al., 2023) over a block table: for row i with query heads of one KV head, the keys are cut into
chunks of CHUNK, each program keeps the running maximum m, sum l and weighted values of its chunk,

    m' = max(m, max_j s_j)   l' = l e^(m - m') + sum_j e^(s_j - m')   o' = o e^(m - m') + sum_j e^(s_j - m') v_j

and a second program folds a row's chunks in their order. A row's chunks depend on its own length alone.
What differs from step to step is not specialised, see `lora`.
"""

from __future__ import annotations

import triton
import triton.language as tl


def half_type(x):
    """The type of products: x's; the interpreter has none of bfloat16."""
    return getattr(tl, str(x.dtype).removeprefix("torch.")) if x.is_cuda else tl.float32


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["table", "lengths"])
def decode_chunks(
    query, pool_k, pool_v, table, lengths, partial, sums, scale, softcap, width, window,
    G: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Grid (rows, kv heads, chunks). query [rows, kv heads * G, D]; pools [blocks, BLOCK_SIZE, kv heads, D]; partial
    [rows, kv heads * G, chunks, D] float32; sums [rows, kv heads * G, chunks, 2] float32: m and l.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    low = tl.maximum(length - window, 0)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    heads = kv_head * G + g
    top = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    values = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    q_mask = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(query + (row * KV_HEADS * G + heads[:, None]) * D + d[None, :], mask=q_mask, other=0.0).to(HALF)
    end = tl.minimum((chunk + 1) * CHUNK, length)
    begin = tl.maximum(chunk * CHUNK, low // BLOCK_N * BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        p = start + tl.arange(0, BLOCK_N)
        seen = (p < end) & (p >= low)
        block = tl.load(table + row * width + p // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        place = ((block * BLOCK_SIZE + p % BLOCK_SIZE) * KV_HEADS + kv_head) * D
        mask = seen[:, None] & (d < D)[None, :]
        k = tl.load(pool_k + place[:, None] + d[None, :], mask=mask, other=0.0).to(HALF)
        v = tl.load(pool_v + place[:, None] + d[None, :], mask=mask, other=0.0).to(HALF)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weights = tl.exp(scores - anchor[:, None])
        fade = tl.exp(top - anchor)
        total = total * fade + tl.sum(weights, axis=1)
        values = values * fade[:, None] + tl.dot(weights.to(HALF), v, input_precision="ieee")
        top = higher
    chunks = tl.num_programs(2)
    place_of = (row * KV_HEADS * G + heads) * chunks + chunk
    tl.store(partial + place_of[:, None] * D + d[None, :], values, mask=q_mask)
    tl.store(sums + place_of * 2, top, mask=g < G)
    tl.store(sums + place_of * 2 + 1, total, mask=g < G)


@triton.jit(do_not_specialize=["chunks"], do_not_specialize_on_alignment=["lengths"])
def fold_chunks(
    partial, sums, lengths, out, num_heads, chunks,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads): out [rows, heads, D]."""
    row = tl.program_id(0).to(tl.int64)
    place = row * num_heads + tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    values = tl.zeros([BLOCK_D], dtype=tl.float32)
    total = 0.0
    top = float("-inf")
    for chunk in range((tl.load(lengths + row).to(tl.int32) + CHUNK - 1) // CHUNK):
        own = tl.load(sums + (place * chunks + chunk) * 2)
        higher = tl.maximum(top, own)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(top - anchor)
        weight = tl.exp(own - anchor)
        total = total * fade + tl.load(sums + (place * chunks + chunk) * 2 + 1) * weight
        values = values * fade + tl.load(partial + (place * chunks + chunk) * D + d, mask=d < D, other=0.0) * weight
        top = higher
    tl.store(out + place * D + d, (values / total).to(out.dtype.element_ty), mask=d < D)
