"""Decode steps as CUDA graphs, captured once per number of rows and replayed.

A decode step is hundreds of short programs, and a host takes longer to launch them than a GPU to run them. Sizes are
rounded up to powers of two, so that a few graphs serve every step; rows without a sequence fill the rest. A graph reads
buffers, the KV pool and the slots' records: a row's adapter is a number in a buffer, and a slot's new owner is found
through its record, so neither asks for a new capture. CUDA only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.core.batch import Row
from lora_serve.model.base_model import BaseModel
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.runner.packing import RowBuffers

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
class _Shape:
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
        self._captured: dict[_Shape, _Captured] = {}
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

    def _shape(self, rows: Sequence[Row]) -> _Shape:
        num_rows = min(_power_of_two(len(rows)), self._max_num_rows)
        width = max(_MIN_WIDTH, _power_of_two(max(len(row.block_table) for row in rows)))
        return _Shape(num_rows, width, any(row.adapters for row in rows))

    def _seen(self) -> tuple[int, int, int]:
        """The pools whose addresses and sizes are in the graphs: when one changes, all graphs are captured anew."""
        return self._cache.num_resizes, self._slots.num_slots, self._slots.max_rank

    def _capture(self, shape: _Shape) -> _Captured | None:
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
