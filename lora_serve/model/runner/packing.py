"""Rows of a step as tensors: packed in one copy, or in the buffers of a step captured as a CUDA graph."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lora_serve.core.batch import BASE_SLOT, Row
from lora_serve.model.base_model import BaseModel
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import (
    DecodeRows,
    DeviceTokens,
    LoraTokens,
    PrefillRow,
    StepInputs,
    StepVocabularies,
    passes_of,
)
from lora_serve.model.system.device_memory import columns_to_device, to_device

_COLUMNS = 6  # token id, position, place in the cache, keys, slot, is long; then the block table


@dataclass(frozen=True, slots=True)
class LogitSpan:
    """The place of a row's logits among all logits of the step: those of its last positions, or of all of them."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _PackedRows:
    """The packed tokens of each row, and those whose logits are wanted."""

    spans: list[LogitSpan]
    logit_positions: list[int]
    bounds: list[tuple[int, int]]  # packed tokens start .. end of each row


@dataclass(frozen=True, slots=True)
class StepPacker:
    """Packs the rows of a step; rows of one token first."""

    _cache: KVCache
    _slots: LoraSlots
    _base_size: int  # the base model's vocabulary
    _device: torch.device

    def pack(self, rows: Sequence[Row]) -> tuple[StepInputs, list[LogitSpan]]:
        """The step's tensors, and where each row's logits will lie."""
        layout = _layout(rows)
        num_decode = sum(len(row.token_ids) == 1 for row in rows)
        width = max((len(row.block_table) for row in rows[:num_decode]), default=0)
        ids, positions, cached, logit_positions, table, lengths, is_long, *blocks = columns_to_device(
            [
                [token for row in rows for token in row.token_ids],
                [p for row in rows for p in _positions(row)],
                [p for row in rows for p in self._cache_positions(row)],
                layout.logit_positions or [0],
                [b for row in rows[:num_decode] for b in (*row.block_table, *[0] * (width - len(row.block_table)))],
                [row.start + 1 for row in rows[:num_decode]],
                [row.is_long for row in rows for _ in row.token_ids] if any(row.is_long for row in rows) else [],
                *(row.block_table for row in rows[num_decode:]),
            ],
            self._device,
        )
        vocabularies = self._vocabularies(rows, layout.spans, ids[None])
        adapters = [row.adapters for row in rows]
        ends = [row.start + len(row.token_ids) for row in rows]
        outputs = [(end - span.end + span.start, end) for span, end in zip(layout.spans, ends, strict=True)]
        return StepInputs(
            token_ids=ids[None] if vocabularies is None else ids[None].clamp(max=self._base_size - 1),
            position_ids=positions[None],
            cache_positions=cached,
            decode=DecodeRows(num_decode, table.view(num_decode, width), lengths),
            prefill=tuple(
                PrefillRow(start, end, row.start, own)
                for row, own, (start, end) in zip(rows[num_decode:], blocks, layout.bounds[num_decode:], strict=True)
            ),
            logit_positions=logit_positions,
            lora=passes_of(adapters, [(row.start, end) for row, end in zip(rows, ends, strict=True)], self._device),
            lora_logits=passes_of(adapters, outputs, self._device),
            vocabularies=vocabularies,
            is_long=is_long[None] if len(is_long) else None,
        ), layout.spans

    def vocab_size(self, row: Row) -> int:
        """The vocabulary of the row's adapter; 0: the base model's. An adapter with its own is never composed with
        others.
        """
        return self._slots.vocab_size(row.adapters[0].slot.index) if row.adapters else 0

    def _vocabularies(
        self, rows: Sequence[Row], spans: Sequence[LogitSpan], token_ids: Tensor
    ) -> StepVocabularies | None:
        own = {row.adapters[0].slot.index: size for row in rows if (size := self.vocab_size(row))}
        if not own:
            return None
        sizes = [
            self.vocab_size(row) or self._base_size
            for row, span in zip(rows, spans, strict=True)
            for _ in range(span.start, span.end)
        ]
        return StepVocabularies.of(token_ids, own, sizes, self._base_size, self._device)

    def _cache_positions(self, row: Row) -> list[int]:
        size, table = self._cache.block_size, row.block_table
        return [table[p // size] * size + p % size for p in _positions(row)]


def _positions(row: Row) -> range:
    return range(row.start, row.start + len(row.token_ids))


def _layout(rows: Sequence[Row]) -> _PackedRows:
    layout, position = _PackedRows([], [], []), 0
    for row in rows:
        end = position + len(row.token_ids)
        first = position if row.prompt_targets else end - row.num_sampled
        num_before = len(layout.logit_positions)
        layout.spans.append(LogitSpan(num_before, num_before + end - first))
        layout.logit_positions.extend(range(first, end))
        layout.bounds.append((position, end))
        position = end
    return layout


class RowBuffers:
    """Room for `num_rows` rows of one token whose block tables have `width` blocks.

    One piece of int64, filled in one copy per step: five columns, the block table, and the rows' scales as float32.
    """

    def __init__(self, num_rows: int, width: int, block_size: int, idle_block: int, device: torch.device) -> None:
        """`idle_block`: an unused block, which rows without a sequence write to and read."""
        self.num_rows, self._width = num_rows, width
        self._block_size, self._idle_block = block_size, idle_block
        num_words = num_rows * (_COLUMNS + width) + -(-num_rows // 2)
        self._memory = torch.zeros(num_words, dtype=torch.int64, device=device)
        sizes = [num_rows] * _COLUMNS + [num_rows * width, -(-num_rows // 2)]
        columns = torch.split(self._memory, sizes)
        self._ids, self._positions, self._places, self._lengths, self._slots, self._is_long, table, scales = columns
        self._table = table.view(num_rows, width)
        self._scales = scales.view(torch.float32)[:num_rows]
        self._all_rows = torch.arange(num_rows, device=device)

    def fill(self, rows: Sequence[Row]) -> None:
        """Sets the step's values, idle rows behind them. The copy only joins the queue."""
        size, width, most = self._block_size, self._width, self.num_rows
        columns = np.zeros((_COLUMNS, most), dtype=np.int64)
        columns[2:, :] = np.array([[self._idle_block * size], [1], [BASE_SLOT], [0]])
        table = np.zeros((most, width), dtype=np.int64)
        table[:, 0] = self._idle_block
        scales = np.ones(most + most % 2, dtype=np.float32)
        for i, row in enumerate(rows):
            position, blocks = row.start, row.block_table
            place = blocks[position // size] * size + position % size
            slot = row.adapters[0].slot.index if row.adapters else BASE_SLOT
            columns[:, i] = (row.token_ids[0], position, place, position + 1, slot, row.is_long)
            table[i, : len(blocks)] = blocks
            if row.adapters:
                scales[i] = row.adapters[0].scale
        host = np.concatenate([columns.reshape(-1), table.reshape(-1), scales.view(np.int64)])
        self._memory.copy_(to_device(torch.from_numpy(host), torch.int64, self._memory.device))

    def step(self, *, with_lora: bool) -> StepInputs:
        """A new step over the same memory each time: attention's notes on a step belong to one pass."""
        lora: tuple[LoraTokens, ...] = ()
        if with_lora:
            no_pieces = torch.zeros(0, 3, dtype=torch.int32)
            lora = (LoraTokens((), self.num_rows, no_pieces, None, DeviceTokens.of_rows(self._slots, self._scales)),)
        return StepInputs(
            token_ids=self._ids[None],
            position_ids=self._positions[None],
            cache_positions=self._places,
            decode=DecodeRows(self.num_rows, self._table, self._lengths),
            prefill=(),
            logit_positions=self._all_rows,
            lora=lora,
            lora_logits=lora,
            is_long=self._is_long[None],
        )


_log = logging.getLogger(__name__)
_MIN_WIDTH = 8  # blocks


class CudaGraph:
    """A forward pass recorded once and replayed with new values in the memory that it reads, which must not move.

    Tests on the CPU record torch's operations in its place.
    """

    def __init__(self, pool: Any) -> None:
        """`pool`: memory that graphs share which never run at the same time, see `graphs_of_one_pool`."""
        self._pool = pool
        self._graph: Any = torch.cuda.CUDAGraph()

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        """Records `call` and returns the tensor into which every replay writes; it holds nothing yet.

        Raises RuntimeError if the call makes the host wait, which cannot be recorded.
        """
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            call()  # compiles, makes workspaces: nothing of that may happen while it is recorded
        here.wait_stream(side)
        # thread_local: loaders pin memory on their own threads meanwhile
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return call()

    def replay(self) -> None:
        """Runs everything once more, with the values that the inputs have now."""
        self._graph.replay()


def graphs_of_one_pool() -> Callable[[], CudaGraph]:
    """Makes graphs that share memory. Once all of them are gone, torch refuses to capture another one into it."""
    return functools.partial(CudaGraph, torch.cuda.graph_pool_handle())


@dataclass(frozen=True, slots=True)
class _GraphShape:
    """The sizes that a graph was captured for."""

    num_rows: int
    width: int  # blocks of the longest row
    with_lora: bool


@dataclass(frozen=True, slots=True)
class _Captured:
    buffers: RowBuffers
    graph: CudaGraph
    logits: Tensor  # [num_rows, vocab]


class DecodeGraphs:
    """Graphs of the decode step, captured when a shape is first met, for LoRA kernels that `reads_device_tokens`."""

    def __init__(
        self,
        model: BaseModel,
        cache: KVCache,
        slots: LoraSlots,
        max_num_rows: int,
        new_pool: Callable[[], Callable[[], CudaGraph]] = graphs_of_one_pool,
    ) -> None:
        """`max_num_rows`: of the largest step that is replayed. `new_pool`: as `graphs_of_one_pool`."""
        self._model, self._cache, self._slots = model, cache, slots
        self._max_num_rows = max_num_rows
        self._new_pool = new_pool
        self._new_graph = new_pool()
        self._captured: dict[_GraphShape, _Captured] = {}
        self._world = self._seen()
        self._is_off = False

    def can_replay(self, rows: Sequence[Row]) -> bool:
        """True if a graph can run these rows.

        Every row must have one token, no prompt log-probabilities to return, and at most one adapter, which acts on
        this token and only adds deltas to linear layers, in the base model's vocabulary.
        """
        return not self._is_off and len(rows) <= self._max_num_rows and all(map(self._is_simple, rows))

    def logits(self, rows: Sequence[Row]) -> Tensor | None:
        """[rows, vocab] float32, valid until the next step; None: no graph, now and from then on."""
        if self._world != self._seen():
            self._captured.clear()
            self._new_graph = self._new_pool()
            self._world = self._seen()
        shape = self._shape(rows)
        found = self._captured.get(shape)
        if found is None and (found := self._capture(shape)) is None:
            return None
        found.buffers.fill(rows)
        found.graph.replay()
        return found.logits[: len(rows)]

    def _is_simple(self, row: Row) -> bool:
        if len(row.token_ids) != 1 or row.prompt_targets or len(row.adapters) > 1:
            return False
        return all(
            adapter.start <= row.start and not self._slots.has_changes(adapter.slot.index) for adapter in row.adapters
        )

    def _shape(self, rows: Sequence[Row]) -> _GraphShape:
        num_rows = min(_power_of_two(len(rows)), self._max_num_rows)
        width = max(_MIN_WIDTH, _power_of_two(max(len(row.block_table) for row in rows)))
        return _GraphShape(num_rows, width, any(row.adapters for row in rows))

    def _seen(self) -> tuple[int, int, int]:
        """The pools whose addresses and sizes are in the graphs: when one changes, all graphs are captured anew."""
        return self._cache.num_resizes, self._slots.num_slots, self._slots.max_rank

    def _capture(self, shape: _GraphShape) -> _Captured | None:
        (idle,) = self._cache.spare_blocks(1, 1)
        buffers = RowBuffers(shape.num_rows, shape.width, self._cache.block_size, idle[0], self._cache.device)
        buffers.fill(())
        graph = self._new_graph()
        try:
            logits = graph.capture(lambda: self._model.logits(buffers.step(with_lora=shape.with_lora)))
        except RuntimeError as error:  # out of memory, or a model whose code waits for the device
            _log.warning("decode steps are not captured as graphs from now on: %s", str(error).partition("\n")[0])
            self._is_off = True
            self._captured.clear()
            return None
        self._captured[shape] = _Captured(buffers, graph, logits)
        return self._captured[shape]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
