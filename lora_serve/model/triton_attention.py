"""Paged attention in Triton, compiled where it runs; without a GPU its interpreter runs it in tests.

Decode attention over the cache as it lies is Flash-Decoding (Dao et al., 2023) over a block table: for row i with query
heads of one KV head, the keys are cut into chunks of CHUNK, each program keeps the running maximum m, sum l and
weighted values of its chunk,

    m' = max(m, max_j s_j)   l' = l e^(m - m') + sum_j e^(s_j - m')   o' = o e^(m - m') + sum_j e^(s_j - m') v_j

and a second program folds a row's chunks by the same formulas, some at a time. A sink of score s, which has no value,
comes last: l' = l + e^(s - m). Which chunks a row has depends on its own length and on what the layer lets it see
alone; programs beyond them leave at once, and what they did not write is never read.

Rows of several tokens are cut into tiles of QUERY_TILE tokens, and one program computes a tile's tokens over all keys
that they see, for HEADS query heads of one KV head: a product has a row for each of its tokens' heads. A token's sums
have the order of its keys, from the first that some token of its tile sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lora_serve.model.triton_programs import product_type  # noqa: F401 - asked of this module


@triton.jit
def _numbers(places, mask, STORED: tl.constexpr):
    """K or V as it is stored: codes without their scale, which products of them meet."""
    if STORED == 0:
        found = tl.load(places, mask=mask, other=0.0)
    else:
        codes = tl.load(places, mask=mask, other=0)
        if STORED == 1:
            found = codes.to(tl.int8, bitcast=True).to(tl.float32)
        else:  # e4m3 without denormal numbers, see native/kv_codes.h
            raw = codes.to(tl.int32)
            size = raw & 0x7F
            bits = tl.where(size == 0, 0, (size << 20) + (120 << 23)) | (raw >> 7 << 31)
            found = bits.to(tl.float32, bitcast=True)
    return found


@triton.jit
def _scales(rows, inside, WIDTH: tl.constexpr):
    """The scale at the end of each row of codes."""
    return tl.load((rows + WIDTH - 4).to(tl.pointer_type(tl.float32), bitcast=True), mask=inside, other=0.0)


@triton.jit
def _with_keys(
    q, blocks, p, inside, seen, pool_k, pool_v, kv_head, d, scale, softcap, top, total, values,
    D: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HALF: tl.constexpr,
    STORED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """m', l' and o' of the formulas above: with the keys at positions p that are `inside` the row, of which each query
    sees `seen`. `blocks`: the row's own, in the block table.
    """
    block = tl.load(blocks + p // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    place = ((block * BLOCK_SIZE + p % BLOCK_SIZE) * KV_HEADS + kv_head) * WIDTH
    mask = inside[:, None] & (d < D)[None, :]
    k = _numbers(pool_k + place[:, None] + d[None, :], mask, STORED).to(HALF)
    v = _numbers(pool_v + place[:, None] + d[None, :], mask, STORED).to(HALF)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if STORED != 0:
        scores *= _scales(pool_k + place, inside, WIDTH)[None, :]
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    weights = tl.exp(scores - anchor[:, None])
    fade = tl.exp(top - anchor)
    total = total * fade + tl.sum(weights, axis=1)
    if STORED != 0:
        weights = tl.where(seen, weights * _scales(pool_v + place, inside, WIDTH)[None, :], 0.0)
    values = values * fade[:, None] + tl.dot(weights.to(HALF), v, input_precision="ieee")
    return higher, total, values


@triton.jit
def _first_seen(position, window, attention_chunk):
    """The first position that a token sees."""
    return tl.maximum(position - window + 1, position // attention_chunk * attention_chunk)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["table", "lengths"])
def decode_chunks(
    query, pool_k, pool_v, table, lengths, partial, sums, scale, softcap, width, window, attention_chunk,
    G: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HALF: tl.constexpr,
    STORED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (rows, kv heads, chunks). query [rows, kv heads * G, D]; pools [blocks, BLOCK_SIZE, kv heads, WIDTH];
    partial [rows, kv heads * G, chunks, D] float32; sums [rows, kv heads * G, chunks, 2] float32: m and l.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    low = _first_seen(length - 1, window, attention_chunk)
    if (chunk * CHUNK >= length) | ((chunk + 1) * CHUNK <= low):
        return
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
        top, total, values = _with_keys(
            q, table + row * width, p, seen, seen[None, :], pool_k, pool_v, kv_head, d, scale, softcap, top, total,
            values, D, KV_HEADS, BLOCK_SIZE, HAS_SOFTCAP, HALF, STORED, WIDTH,
        )  # fmt: skip
    chunks = tl.num_programs(2)
    place_of = (row * KV_HEADS * G + heads) * chunks + chunk
    tl.store(partial + place_of[:, None] * D + d[None, :], values, mask=q_mask)
    tl.store(sums + place_of * 2, top, mask=g < G)
    tl.store(sums + place_of * 2 + 1, total, mask=g < G)


@triton.jit
def _sink(score, top):
    """e^(s - m), as far as float32 goes."""
    return tl.exp(tl.minimum(score - top, 80.0))


@triton.jit(do_not_specialize=["chunks"], do_not_specialize_on_alignment=["lengths"])
def fold_chunks(
    partial, sums, lengths, out, sinks, num_heads, chunks, window, attention_chunk,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads): out [rows, heads, D]; sinks [heads] float32. BLOCK_C chunks at a time, from the first that a
    row sees.
    """
    row = tl.program_id(0).to(tl.int64)
    place = (row * num_heads + tl.program_id(1)) * chunks
    length = tl.load(lengths + row).to(tl.int32)
    end = (length + CHUNK - 1) // CHUNK
    d = tl.arange(0, BLOCK_D)
    values = tl.zeros([BLOCK_D], dtype=tl.float32)
    total, top = 0.0, float("-inf")
    for start in range(_first_seen(length - 1, window, attention_chunk) // CHUNK, end, BLOCK_C):
        chunk = start + tl.arange(0, BLOCK_C)
        here = chunk < end
        mask = here[:, None] & (d < D)[None, :]
        found = tl.load(partial + (place + chunk)[:, None] * D + d[None, :], mask=mask, other=0.0)
        tops = tl.load(sums + (place + chunk) * 2, mask=here, other=float("-inf"))
        totals = tl.load(sums + (place + chunk) * 2 + 1, mask=here, other=0.0)
        higher = tl.maximum(top, tl.max(tops, axis=0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(top - anchor)
        weights = tl.exp(tops - anchor)
        total = total * fade + tl.sum(totals * weights, axis=0)
        values = values * fade + tl.sum(found * weights[:, None], axis=0)
        top = higher
    if HAS_SINKS:
        total += _sink(tl.load(sinks + tl.program_id(1)), top)
    tl.store(out + (row * num_heads + tl.program_id(1)) * D + d, (values / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["row_tiles", "table"])
def attend_tiles(
    query, pool_k, pool_v, row_tiles, table, out, sinks, scale, softcap, width, window, attention_chunk,
    G: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HALF: tl.constexpr,
    HAS_SINKS: tl.constexpr, STORED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, pieces of HEADS of their G heads): query and out [tokens, kv heads * G, D]; pools [blocks,
    BLOCK_SIZE, kv heads, WIDTH]; row_tiles [tiles, 4] int64: first token, number of tokens (0: none), position of the
    first, row of table; sinks [kv heads * G] float32. Tokens of no tile are left as they are.
    """
    tile = row_tiles + tl.program_id(0) * 4
    count = tl.load(tile + 1).to(tl.int32)
    if count > 0:
        first = tl.load(tile)
        position = tl.load(tile + 2).to(tl.int32)
        blocks = table + tl.load(tile + 3) * width
        kv_head = tl.program_id(1)
        m = tl.arange(0, BLOCK_M)
        token = m // HEADS
        head = tl.program_id(2) * HEADS + m % HEADS
        d = tl.arange(0, BLOCK_D)
        q_mask = ((token < count) & (head < G))[:, None] & (d < D)[None, :]
        place = ((first + token) * KV_HEADS * G + kv_head * G + head) * D
        q = tl.load(query + place[:, None] + d[None, :], mask=q_mask, other=0.0).to(HALF)
        own = position + token
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        values = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        end = position + count
        low = _first_seen(own, window, attention_chunk)
        begin = _first_seen(position, window, attention_chunk) // BLOCK_N * BLOCK_N
        for start in range(begin, end, BLOCK_N):
            p = start + tl.arange(0, BLOCK_N)
            seen = (p[None, :] <= own[:, None]) & (p[None, :] >= low[:, None])
            top, total, values = _with_keys(
                q, blocks, p, p < end, seen, pool_k, pool_v, kv_head, d, scale, softcap, top, total, values,
                D, KV_HEADS, BLOCK_SIZE, HAS_SOFTCAP, HALF, STORED, WIDTH,
            )  # fmt: skip
        if HAS_SINKS:
            total += _sink(tl.load(sinks + kv_head * G + head, mask=head < G, other=0.0), top)
        found = values / tl.where(token < count, total, 1.0)[:, None]
        tl.store(out + place[:, None] + d[None, :], found.to(out.dtype.element_ty), mask=q_mask)
