"""Paged attention in Triton over the cache as it lies, against the definition in float64; interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_serve.model.attention import varlen
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.paged_attention import PagedAttention
from lora_serve.model.step_context import QUERY_TILE, AttentionSettings, DecodeRows, TiledRows
from tests.contracts.test_attention import older_varlen
from tests.model.tiny import filled_cache, step_of

BLOCK_SIZE = 16
LENGTHS = (1, 15, 16, 255, 256, 257, 5003)  # the last is twenty chunks: more than are folded at a time
NUM_BLOCKS = 640


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors of the test that begin without values: here they begin as NaN."""
    found: list[torch.Tensor] = []

    def poisoned(*size: int, **given: Any) -> torch.Tensor:
        found.append(torch.full(size, float("nan"), **given))
        return found[-1]

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, float("nan")))
    return found


def decode_rows(lengths: tuple[int, ...]) -> DecodeRows:
    rows, first = [], 1
    for length in lengths:
        count = -(-length // BLOCK_SIZE)
        rows.append((length - 1, 1, list(range(first, first + count))))
        first += count
    return step_of(rows).decode


def paged_attention(cache: KVCache) -> PagedAttention:
    paged = varlen.Backend(cache, older_varlen)._paged
    assert paged is not None
    return paged


def expected(cache: KVCache, query: torch.Tensor, rows: DecodeRows, settings: AttentionSettings) -> torch.Tensor:
    window, softcap, sinks = settings.window, settings.softcap, settings.sinks
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // cache.shape.layers[0].num_heads
    for row, (blocks, length) in enumerate(zip(rows.block_table, rows.lengths.tolist(), strict=True)):
        first = 0 if window is None else max(0, length - window)
        first = first if settings.chunk is None else max(first, (length - 1) // settings.chunk * settings.chunk)
        keys, values = (one[first:length].double().repeat_interleave(group, 1) for one in cache.gather(0, blocks))
        scores = torch.einsum("hd,khd->hk", query[row].double(), keys) * settings.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].double()], dim=1)
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : length - first], values)
    return out


def settings_of(
    window: int | None, softcap: float | None, num_sinks: int = 0, chunk: int | None = None
) -> AttentionSettings:
    return AttentionSettings(0.2, window, softcap, torch.linspace(-2, 5, num_sinks) if num_sinks else None, chunk)


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "softcap", "num_sinks"),
    [
        (1, 1, 64, None, None, 0),
        (2, 2, 64, 300, None, 2),
        (6, 2, 80, None, 1.5, 6),
        (4, 1, 128, 4500, None, 0),
        (16, 1, 256, None, None, 0),
        (8, 1, 256, 256, 20.0, 0),
        (2, 1, 64, 1, None, 0),
    ],
)
def test_ragged_rows_are_the_definition(
    made: list[torch.Tensor],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    num_sinks: int,
) -> None:
    torch.manual_seed(0)
    settings = settings_of(window, softcap, num_sinks)
    cache, rows = filled_cache(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), decode_rows(LENGTHS)
    query, paged = torch.randn(len(LENGTHS), num_heads, head_dim), paged_attention(cache)
    made.clear()
    found = paged.decode(0, query, rows, settings)
    assert torch.allclose(found.double(), expected(cache, query, rows, settings), atol=1e-5)
    partial, sums = made
    for row, length in enumerate(LENGTHS):
        first = 0 if window is None else max(0, length - window) // 256
        for written in (partial[row], sums[row]):
            assert written[:, :first].isnan().all()
            assert not written[:, first : -(-length // 256)].isnan().any()
            assert written[:, -(-length // 256) :].isnan().all()


@pytest.mark.parametrize(("window", "chunk"), [(None, 256), (None, 300), (None, 16), (200, 5000), (None, 6000)])
def test_rows_see_no_chunk_but_their_own(window: int | None, chunk: int) -> None:
    torch.manual_seed(0)
    settings = settings_of(window, None, chunk=chunk)
    cache, rows = filled_cache(NUM_BLOCKS, BLOCK_SIZE, 2, 16), decode_rows(LENGTHS)
    query, paged = torch.randn(len(LENGTHS), 4, 16), paged_attention(cache)
    found = paged.decode(0, query, rows, settings)
    assert torch.allclose(found.double(), expected(cache, query, rows, settings), atol=1e-5)


@pytest.mark.parametrize("stored", ["int8", "fp8_e4m3"])
def test_rows_of_codes_are_the_definition(stored: str) -> None:
    torch.manual_seed(0)
    settings = settings_of(300, 1.5, 4)
    cache, rows = filled_cache(NUM_BLOCKS, BLOCK_SIZE, 2, 20, stored=stored), decode_rows(LENGTHS)
    query, paged = torch.randn(len(LENGTHS), 4, 20), paged_attention(cache)
    found = paged.decode(0, query, rows, settings)
    assert torch.allclose(found.double(), expected(cache, query, rows, settings), atol=1e-5)


@pytest.mark.parametrize("window", [None, 4400])
def test_row_has_the_same_bits_alone_and_beside_a_longer_one(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = (4500, 257, 5003)
    cache, rows = filled_cache(NUM_BLOCKS, BLOCK_SIZE, 1, 64), decode_rows(lengths)
    query, paged = torch.randn(3, 2, 64), paged_attention(cache)
    together = paged.decode(0, query, rows, AttentionSettings(0.2, window, None))
    for row in (0, 1):
        table = rows.block_table[row : row + 1, : -(-lengths[row] // BLOCK_SIZE)].contiguous()
        alone = paged.decode(
            0,
            query[row : row + 1],
            DecodeRows(1, table, rows.lengths[row : row + 1]),
            AttentionSettings(0.2, window, None),
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("pool", [0, 1])
def test_keys_and_values_that_are_no_numbers_stay_with_their_row(pool: int) -> None:
    torch.manual_seed(0)
    cache, rows = filled_cache(NUM_BLOCKS, BLOCK_SIZE, 2, 8), decode_rows((300, 40, 600))
    query, paged = torch.randn(3, 4, 8), paged_attention(cache)
    clean = paged.decode(0, query, rows, AttentionSettings(0.3, 280, None))
    table = rows.block_table
    cache.layer(0)[pool][table[0, 10], 1] = float("nan")
    cache.layer(0)[pool][table[2, 1], 1] = float("nan")  # before the window
    found = paged.decode(0, query, rows, AttentionSettings(0.3, 280, None))
    assert found[0].isnan().all()
    assert torch.equal(found[1:], clean[1:])


TILED = (
    (0, 1),
    (0, 40),
    (37, 16),
    (300, 17),
    (5, 3),
)  # (context, tokens) of rows, whose tokens lie one after the other


def tiled_rows(num_idle_tiles: int) -> TiledRows:
    tiles, tables, token, block = [], [], 0, 1
    for row, (context, num_tokens) in enumerate(TILED):
        count = -(-(context + num_tokens) // BLOCK_SIZE)
        tables.append([*range(block, block + count), *[0] * (24 - count)])
        for first in range(0, num_tokens, QUERY_TILE):
            tiles.append((token + first, min(QUERY_TILE, num_tokens - first), context + first, row))
        token, block = token + num_tokens, block + count
    tiles += [(0, 0, 0, 0)] * num_idle_tiles
    return TiledRows(torch.tensor(tiles), torch.tensor(tables))


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "softcap", "num_sinks", "chunk", "stored"),
    [
        (1, 1, 64, None, None, 0, None, "auto"),
        (14, 2, 64, 30, None, 14, None, "auto"),
        (6, 2, 80, None, 1.5, 6, None, "auto"),
        (16, 1, 128, 280, None, 0, None, "auto"),
        (12, 1, 256, None, 20.0, 0, None, "auto"),
        (2, 1, 16, 1, None, 0, None, "auto"),
        (4, 2, 16, None, None, 4, 25, "auto"),
        (4, 2, 16, 20, None, 0, 32, "auto"),
        (6, 2, 20, 30, 1.5, 6, None, "int8"),
        (6, 2, 64, None, None, 0, None, "fp8_e4m3"),
    ],
)
def test_tiles_of_rows_are_the_definition(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    num_sinks: int,
    chunk: int | None,
    stored: str,
) -> None:
    torch.manual_seed(0)
    settings = settings_of(window, softcap, num_sinks, chunk)
    cache, rows = filled_cache(64, BLOCK_SIZE, num_kv_heads, head_dim, stored=stored), tiled_rows(2)
    num_tokens = sum(count for _, count in TILED)
    query, out = (
        torch.randn(num_tokens + 1, num_heads, head_dim),
        torch.full((num_tokens + 1, num_heads, head_dim), 7.0),
    )
    paged_attention(cache).attend_tiles(0, query, rows, out, settings)
    token = 0
    for row, (context, count) in enumerate(TILED):
        lengths = torch.arange(context + 1, context + count + 1)
        each = DecodeRows(count, rows.block_table[row].expand(count, -1), lengths)
        here = slice(token, token + count)
        assert torch.allclose(out[here].double(), expected(cache, query[here], each, settings), atol=1e-5)
        token += count
    assert (out[num_tokens:] == 7.0).all(), "a token of no tile"
