"""Paged attention with torch's `varlen_attn` (FlashAttention) on GPUs, with the features of the installed torch.

Decode rows and rows of several tokens are one call each, where attention in chunks takes each chunk of a row for one.
What a call does not support here goes elsewhere: decode rows and tiles to `PagedAttention`; soft caps, sinks and
unsupported types or sizes to `sdpa`. torch 2.11 has no block
tables; there K and V of rows with a context are gathered first. No GPU has run the calls with block tables, or tiles,
yet.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.attention import sdpa
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.kv_format import PLAIN
from lora_serve.model.paged_attention import PagedAttention, can_run
from lora_serve.model.step_context import AttentionSettings, DecodeRows, PrefillRow, StepInputs
from lora_serve.model.system.device_memory import columns_to_device

PREFERENCE = 3
_TYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_DECODE, _PREFILL = "varlen decode", "varlen prefill"

Varlen = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Features:
    """The arguments that this torch's `varlen_attn` takes, by its signature."""

    windows: bool
    groups: bool  # fewer KV heads than query heads
    pages: bool
    splits: bool  # how many parts a row's keys are summed in, which else follows from all rows of the call

    @staticmethod
    def of(varlen: Varlen) -> Features:
        names = inspect.signature(varlen).parameters
        pages = {"block_table", "seqused_k"} <= names.keys()
        return Features("window_size" in names, "enable_gqa" in names, pages, "num_splits" in names)


@dataclass(frozen=True, slots=True)
class _PrefillPlan:
    """The step's rows of several tokens, the same for every layer."""

    query_ends: Tensor  # [rows + 1] int32: where each row's tokens begin, counted from the first such row
    key_ends: Tensor  # likewise of its keys
    max_query: int
    max_keys: int
    places: Tensor | None  # [num_keys] flat positions in the cache; None: the keys are the step's own, as computed


class Backend:
    def __init__(self, cache: KVCache, varlen: Varlen | None = None, types: tuple[torch.dtype, ...] = _TYPES) -> None:
        """`varlen`, `types`: torch's own function and the types it knows by default."""
        self.cache = cache
        self._sdpa = sdpa.Backend(cache)
        found = varlen or torch_varlen()
        assert found is not None, "this torch has no varlen_attn"
        self._varlen: Varlen = found
        self._features = Features.of(found)
        self._fits = cache.shape.dtype in types and max(heads.head_dim for heads in cache.shape.layers) <= _MAX_HEAD_DIM
        self._takes_groups = self._features.groups or (self._fits and self._groups_unasked())
        self._reads_pages = self._fits and self._features.pages and self._can_read_pages()
        device = cache.device
        self._paged = PagedAttention(cache) if can_run(device) else None
        self.reads_tiles = self._paged is not None

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: StepInputs, settings: AttentionSettings
    ) -> Tensor:
        rows = step.decode.num_rows
        if rows == len(query):
            return self._decode(layer, query, step, settings)
        out = torch.empty_like(query) if step.tiled is None else torch.zeros_like(query)
        if rows:
            out[:rows] = self._decode(layer, query[:rows], step, settings)
        if step.tiled is not None:
            assert self._paged is not None
            self._paged.attend_tiles(layer, query, step.tiled, out, settings)
        if step.prefill:
            can = _is_plain(settings) and self._fits and (settings.window is None or self._features.windows)
            attend = self._prefill if can else self._prefill_elsewhere
            out[rows:] = attend(layer, query, key, value, step, settings)
        return out

    def _decode(self, layer: int, query: Tensor, step: StepInputs, settings: AttentionSettings) -> Tensor:
        """query [rows, num_heads, head_dim] -> the same shape."""
        is_stored_plain = self.cache.shape.form is PLAIN
        if self._reads_pages and is_stored_plain and _is_plain(settings) and settings.chunk is None:
            return self._decode_pages(layer, query, step, settings)
        if self._paged is not None:
            return self._paged.decode(layer, query, step.decode, settings)
        return self._sdpa.decode(layer, query, step, settings)

    def _decode_pages(self, layer: int, query: Tensor, step: StepInputs, settings: AttentionSettings) -> Tensor:
        plan = step.prepared.get(_DECODE)
        if plan is None:
            plan = step.prepared[_DECODE] = _pages_of(step)
        rows, table, lengths = plan
        pool_k, pool_v = self.cache.layer(layer)
        longest = table.shape[1] * self.cache.block_size
        return self._call(
            query, pool_k, pool_v, rows, rows * longest, 1, longest, settings, block_table=table, seqused_k=lengths
        )

    def _prefill(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: StepInputs, settings: AttentionSettings
    ) -> Tensor:
        """Attention of the rows of several tokens: [their tokens, num_heads, head_dim]."""
        name = _PREFILL, settings.chunk
        plan = step.prepared.get(name)
        if plan is None:
            plan = step.prepared[name] = _plan_of(step.prefill, self.cache, query.device, settings.chunk)
        assert isinstance(plan, _PrefillPlan)
        start = step.decode.num_rows
        if plan.places is None:
            keys, values = key[start:], value[start:]
        else:
            keys, values = self.cache.gather(layer, plan.places, by_block=False)
        if not self._takes_groups:
            group = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        return self._call(
            query[start:], keys, values, plan.query_ends, plan.key_ends, plan.max_query, plan.max_keys, settings
        )

    def _prefill_elsewhere(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: StepInputs, settings: AttentionSettings
    ) -> Tensor:
        rows = step.decode
        alone = replace(step, decode=DecodeRows(0, rows.block_table[:0], rows.lengths[:0]))
        out = self._sdpa(layer, query, key, value, alone, settings)
        return out[rows.num_rows :]

    def _call(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        query_ends: Tensor,
        key_ends: Tensor,
        max_query: int,
        max_keys: int,
        settings: AttentionSettings,
        **pages: Tensor,
    ) -> Tensor:
        """Causal attention: the last query sees the last key."""
        window = settings.window
        given: dict[str, Any] = dict(pages)
        if self._features.windows:
            given["window_size"] = (-1 if window is None else window - 1, 0)
        else:
            given["is_causal"] = True
        if self._features.groups:
            given["enable_gqa"] = True
        if self._features.splits:
            given["num_splits"] = 1  # so that a row's bits do not depend on the others
        found: Tensor = self._varlen(
            query.contiguous(), keys, values, query_ends, key_ends, max_query, max_keys, scale=settings.scale, **given
        )
        return found

    def _groups_unasked(self) -> bool:
        """Tries groups of two on a row of two tokens. torch 2.11 hands K and V to FlashAttention as they are, which
        takes any number of heads that divides the query's; that its signature does not say.
        """
        shape, device = self.cache.shape, self.cache.device
        size = (2, *shape.layers[0])
        keys = torch.linspace(-1, 1, math.prod(size), device=device).view(size).to(shape.dtype)
        query, repeated = torch.cat([keys, keys], dim=1), keys.repeat_interleave(2, dim=1)
        ends = torch.tensor([0, 2], dtype=torch.int32, device=device)
        try:
            found, wanted = (
                self._call(query, one, one, ends, ends, 2, 2, AttentionSettings(1.0)) for one in (keys, repeated)
            )
        except (RuntimeError, ValueError):
            return False
        return torch.equal(found, wanted)

    def _can_read_pages(self) -> bool:
        """Tries this block size with one row of one key: FlashAttention 2 wants multiples of 256."""
        shape, device = self.cache.shape, self.cache.device
        pool = torch.zeros(2, self.cache.block_size, *shape.layers[0], dtype=shape.dtype, device=device)
        one = torch.ones(1, dtype=torch.int32, device=device)
        ends = torch.arange(2, dtype=torch.int32, device=device)
        query = torch.zeros(1, *shape.layers[0], dtype=shape.dtype, device=device)
        try:
            self._call(
                query, pool, pool, ends, ends, 1, 1, AttentionSettings(1.0), block_table=one[None], seqused_k=one
            )
        except RuntimeError:
            return False
        return True


def why_not(cache: KVCache) -> str | None:
    """The reason why varlen cannot serve `cache`; None: it can."""
    if cache.device.type != "cuda":
        return "FlashAttention runs on CUDA devices"
    return "this torch has no torch.nn.attention.varlen" if torch_varlen() is None else None


def _is_plain(settings: AttentionSettings) -> bool:
    """True if scores are neither capped nor stand beside sinks."""
    return settings.softcap is None and settings.sinks is None


def torch_varlen() -> Varlen | None:
    """torch's function; None if this torch has none."""
    try:
        found: Varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return found


def _pages_of(step: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers 0 to num_rows, the block table and the lengths: all int32."""
    rows = torch.arange(step.decode.num_rows + 1, dtype=torch.int32, device=step.decode.lengths.device)
    return rows, step.decode.block_table.to(torch.int32), step.decode.lengths.to(torch.int32)


def _plan_of(rows: Sequence[PrefillRow], cache: KVCache, device: torch.device, chunk: int | None) -> _PrefillPlan:
    seen = [(row, *piece) for row in rows for piece in _pieces_of(row, chunk)]
    counts = [end - begin for _, _, begin, end in seen]
    lengths = [end - first for _, first, _, end in seen]
    ends = columns_to_device([[0, *itertools.accumulate(counts)], [0, *itertools.accumulate(lengths)]], device)
    places = None
    if cache.shape.form is not PLAIN or any(row.context for row in rows):
        size, offsets = cache.block_size, torch.arange(cache.block_size, device=device)
        each = [(row.blocks[:, None] * size + offsets).view(-1)[first:end] for row, first, _, end in seen]
        places = torch.cat(each)
    query_ends, key_ends = (column.to(torch.int32) for column in ends)
    return _PrefillPlan(query_ends, key_ends, max(counts), max(lengths), places)


def _pieces_of(row: PrefillRow, chunk: int | None) -> Iterator[tuple[int, int, int]]:
    """The positions of a row's tokens, begin .. end, cut where chunks end; before them, the first that they see."""
    begin, last = row.context, row.context + row.end - row.start
    while begin < last:
        first = 0 if chunk is None else begin // chunk * chunk
        end = last if chunk is None else min(last, first + chunk)
        yield first, begin, end
        begin = end
