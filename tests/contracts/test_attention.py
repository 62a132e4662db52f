"""Every attention backend against the definition, computed row by row in float64."""

from __future__ import annotations

import functools
import math
from typing import Any, get_args

import pytest
import torch

from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings
from lora_serve.model import attention, backend_names
from lora_serve.model.attention import Attention, create_attention, varlen
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.step_context import AttentionSettings
from tests.model.tiny import filled_cache, step_of

# (context, tokens, blocks of 4 tokens), decode rows first
ROWS = [(6, 1, [3, 1]), (0, 1, [2]), (13, 1, [4, 5, 6, 7]), (0, 5, [8, 9]), (6, 7, [10, 11, 12, 13]), (3, 2, [14, 15])]


def expected(cache: KVCache, query: torch.Tensor, settings: AttentionSettings) -> torch.Tensor:
    """softmax over the visible keys, one query token and one head at a time."""
    window, softcap, chunk = settings.window, settings.softcap, settings.chunk
    keys, values = (one.double() for one in cache.gather(0, torch.arange(cache.num_blocks)))
    out, token = torch.zeros_like(query, dtype=torch.float64), 0
    group = query.shape[1] // keys.shape[1]
    for context, tokens, blocks in ROWS:
        places = [block * cache.block_size + offset for block in blocks for offset in range(cache.block_size)]
        for position in range(context, context + tokens):
            first = 0 if chunk is None else position - position % chunk
            first = first if window is None else max(first, position - window + 1)
            seen = torch.tensor(places[first : position + 1])
            for head in range(query.shape[1]):
                scores = keys[seen, head // group] @ query[token, head].double() * settings.scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if settings.sinks is not None:
                    scores = torch.cat([scores, settings.sinks[head, None].double()])
                out[token, head] = torch.softmax(scores, 0)[: len(seen)] @ values[seen, head // group]
            token += 1
    return out


def plain_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch 2.13's varlen_attn, as its documentation defines it, in plain maths; batch-invariant calls alone."""
    assert num_splits == 1
    out, group = torch.empty_like(query), query.shape[1] // key.shape[-2]
    if group > 1 and not enable_gqa:
        raise ValueError("Try setting enable_gqa=True for GQA.")
    for row in range(len(cu_seq_q) - 1):
        first, end = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        begin, stop = int(cu_seq_k[row]), int(cu_seq_k[row + 1])
        if block_table is None:
            keys, values = key[begin:stop], value[begin:stop]
        else:
            assert seqused_k is not None
            length, pages = int(seqused_k[row]), block_table[row]
            assert block_table.dtype == seqused_k.dtype == torch.int32
            keys, values = (pool[pages].flatten(0, 1)[:length] for pool in (key, value))
        assert end - first <= max_q
        assert len(keys) <= max_k
        places = torch.arange(len(keys) - (end - first), len(keys))[:, None]
        seen = torch.arange(len(keys))[None] <= places + window_size[1]
        if window_size[0] >= 0:
            seen &= torch.arange(len(keys))[None] >= places - window_size[0]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:end], keys) * (scale or query.shape[-1] ** -0.5)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def older_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    """One without pages and groups of heads."""
    return plain_varlen(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size, num_splits=1
    )


@functools.wraps(older_varlen)
def silent_varlen(query: torch.Tensor, key: torch.Tensor, *others: Any, **given: Any) -> torch.Tensor:
    """torch 2.11's: groups of heads are not in its signature, and go well."""
    return plain_varlen(query, key, *others, **given, enable_gqa=True, num_splits=1)


@functools.wraps(older_varlen)
def wrong_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **given: Any) -> Any:
    """One that takes fewer KV heads and pairs them with the wrong query heads."""
    group = query.shape[1] // key.shape[1]
    return plain_varlen(query, key.repeat(1, group, 1), value.repeat(1, group, 1), *others, **given, num_splits=1)


@functools.wraps(plain_varlen)
def choosy_varlen(query: torch.Tensor, key: torch.Tensor, *others: Any, **given: Any) -> torch.Tensor:
    """FlashAttention 2 reads pages of 256 tokens only."""
    if given.get("block_table") is not None and key.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    return plain_varlen(query, key, *others, **given)


def test_files_are_the_values_of_the_setting() -> None:
    assert get_args(Settings.model_fields["attention"].annotation) == ("auto", *backend_names(attention))


VARLEN = {
    "varlen": plain_varlen,
    "varlen of torch 2.11": silent_varlen,
    "varlen without groups": older_varlen,
    "varlen with wrong groups": wrong_varlen,
    "varlen without pages": choosy_varlen,
}


def made(name: str, cache: KVCache) -> Attention:
    """A backend on the CPU; varlen with torch's function of several versions, its Triton programs interpreted."""
    if name in VARLEN:
        return varlen.Backend(cache, VARLEN[name], (torch.float32,))
    if name == "varlen of no type":  # decode rows are Triton's, others sdpa's
        return varlen.Backend(cache, plain_varlen, ())
    return create_attention(name, cache)


@pytest.mark.crossed
@pytest.mark.parametrize("name", [*backend_names(attention), "varlen of torch 2.11"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_is_the_definition(
    name: str, num_heads: int, num_kv_heads: int, window: int | None, softcap: float | None
) -> None:
    check_definition(name, num_heads, num_kv_heads, window, softcap)


@pytest.mark.parametrize("name", [*backend_names(attention), *list(VARLEN)[1:], "varlen of no type"])
@pytest.mark.parametrize(("window", "chunk"), [(None, 1), (None, 4), (None, 5), (None, 7), (None, 100), (3, 5)])
def test_chunk_hides_what_lies_before_its_own_start(name: str, window: int | None, chunk: int) -> None:
    check_definition(name, 6, 2, window, None, chunk=chunk)


@pytest.mark.parametrize("name", [*list(VARLEN)[2:], "varlen of no type"])
def test_varlen_falls_back_to_what_can_serve(name: str) -> None:
    check_definition(name, 6, 2, 4, None)


@pytest.mark.crossed
@pytest.mark.parametrize("name", [*backend_names(attention), "varlen without pages"])
@pytest.mark.parametrize(("num_kv_heads", "window", "softcap"), [(6, None, None), (2, 4, None), (1, None, 1.5)])
def test_a_sink_weighs_as_a_key_without_a_value(
    name: str, num_kv_heads: int, window: int | None, softcap: float | None
) -> None:
    check_definition(name, 6, num_kv_heads, window, softcap, torch.tensor([-3.0, 0.0, 1.0, 2.0, 30.0, 400.0]))


@pytest.mark.parametrize("name", [*backend_names(attention), "varlen of torch 2.11", "varlen of no type"])
@pytest.mark.parametrize("stored", ["int8", "fp8_e4m3"])
def test_all_read_what_is_stored_in_one_byte_a_number(name: str, stored: str) -> None:
    check_definition(name, 6, 2, 4, 1.5, stored=stored)
    check_definition(name, 6, 2, None, None, stored=stored)


def check_definition(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
    stored: str = "auto",
) -> None:
    torch.manual_seed(0)
    cache = filled_cache(16, 4, num_kv_heads, 8, stored=stored)
    backend = made(name, cache)
    step = step_of(ROWS)
    query = torch.randn(sum(tokens for _, tokens, _ in ROWS), num_heads, 8)
    keys, values = cache.gather(0, torch.arange(cache.num_blocks))
    keys, values = (one + (stored != "auto") for one in (keys, values))  # not what was stored, and so not to be read
    places = torch.tensor(
        [blocks[p // 4] * 4 + p % 4 for context, tokens, blocks in ROWS for p in range(context, context + tokens)]
    )
    settings = AttentionSettings(1 / math.sqrt(8), window, softcap, sinks, chunk)
    found = backend(0, query, keys[places], values[places], step, settings)
    assert torch.allclose(found.double(), expected(cache, query, settings), atol=1e-5)


def test_features_are_read_off_the_signature() -> None:
    assert varlen.Features.of(plain_varlen) == varlen.Features(windows=True, groups=True, pages=True, splits=True)
    assert varlen.Features.of(older_varlen) == varlen.Features(windows=True, groups=False, pages=False, splits=False)
    own = varlen.torch_varlen()
    assert own is not None
    assert varlen.Features.of(own).windows


def test_what_torch_cannot_read_in_place_is_not_asked_of_it() -> None:
    cache = filled_cache(16, 4, 2, 8)
    assert varlen.Backend(cache, plain_varlen, (torch.float32,))._reads_pages
    assert not varlen.Backend(cache, choosy_varlen, (torch.float32,))._reads_pages
    assert not varlen.Backend(cache, older_varlen, (torch.float32,))._reads_pages
    assert not varlen.Backend(cache, plain_varlen)._fits  # float32


def test_heads_are_repeated_only_for_a_function_that_cannot_group_them() -> None:
    takes = {name: made(name, filled_cache(16, 4, 2, 8))._takes_groups for name in VARLEN}  # type: ignore[attr-defined]
    assert takes == {**dict.fromkeys(VARLEN, True), "varlen without groups": False, "varlen with wrong groups": False}


def test_varlen_is_refused_in_words_where_there_is_no_gpu_and_auto_takes_another() -> None:
    cache = filled_cache(16, 4, 2, 8)
    with pytest.raises(ConfigError, match="--attention varlen: FlashAttention runs on CUDA"):
        create_attention("varlen", cache)
    assert type(create_attention("auto", cache)).__module__.endswith((".native", ".sdpa"))
