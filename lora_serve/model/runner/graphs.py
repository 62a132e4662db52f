"""Steps captured as CUDA graphs, and the choice of the graph for the rows of a step."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lora_serve.core.batch import MemoryLoad, Row
from lora_serve.core.errors import is_out_of_memory
from lora_serve.core.stats import GraphStats
from lora_serve.model.base_model import BaseModel
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.runner.draw_graphs import ALL_KINDS, DrawGraphs, DrawnTokens
from lora_serve.model.runner.packing import LogitSpan
from lora_serve.model.runner.step_buffers import TOKENS_PER_ROW, GraphShape, StepBuffers

_log = logging.getLogger(__name__)
_WIDTHS = (64, 8)  # blocks of the narrowest table, and the factor to each wider one: empty parts of it cost little
MAX_LONG_TOKENS = 512  # of a captured step's rows of several tokens; more take longer to compute than to launch
_MIN_LONG_TOKENS = 64
_MAX_TABLE = 256 * 512  # blocks of a captured step's rows together: wider steps are bound by their keys


def captured_load(max_num_rows: int, max_model_len: int, block_size: int) -> MemoryLoad:
    """The largest step that is captured, whose memory all graphs share."""
    longest = min(max_model_len, _MAX_TABLE * block_size // max_num_rows)
    num_logits = max_num_rows + MAX_LONG_TOKENS // TOKENS_PER_ROW
    return MemoryLoad(max_num_rows + MAX_LONG_TOKENS, num_logits, max_num_rows, max_num_rows, longest)


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
class _Captured:
    buffers: StepBuffers
    graph: CudaGraph
    logits: Tensor  # [num_logits, vocab]
    modules: int  # that it launches LoRA for, see `LoraSlots.expected`


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device computes. The logits are valid until the next step."""

    logits: Tensor  # [num_logits, vocab] float32
    spans: list[LogitSpan]  # each row's part of them
    drawn: DrawnTokens | None = None  # the tokens of rows whose sampling is in a graph too


class StepGraphs:
    """Steps as CUDA graphs, captured when a shape is first met, for LoRA kernels that `reads_device_tokens`.

    A step is hundreds of short programs, and a host takes longer to launch them than a GPU to run them. Sizes are
    rounded up, so that a few graphs serve every step; idle rows and tokens fill the rest. A graph reads buffers, the KV
    pool and the slots' records: a row's adapter is a number in a buffer, and a slot's new owner is found through its
    record, so neither asks for a new capture, as long as that touches no module that the graph launches nothing for.
    Rows of several tokens need a backend of attention that `reads_tiles`.
    """

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
        self._captured: dict[GraphShape, _Captured] = {}
        self._draws: DrawGraphs | None = None  # none before the first capture: its memory is large
        self._failed: set[GraphShape] = set()  # these sizes alone go the ordinary way from then on
        self._world = self._seen()
        self._num_replayed = self._num_captured = self._num_failed = 0
        self._capture_seconds = 0.0
        self._cannot_be_captured = False  # none was, and that not for lack of memory

    def stats(self) -> GraphStats:
        counts = self._num_replayed, self._num_captured, self._num_failed
        return GraphStats(*counts, self._capture_seconds, self._model.compiled.seconds)

    def launch(
        self, rows: Sequence[Row], places: Mapping[int, int] = MappingProxyType({}), *, is_ahead: bool = False
    ) -> LaunchedStep | None:
        """Replays the step and the draws of its tokens, as far as a graph can draw them; does not wait. None: no graph
        serves these rows. Rows of one token come first; `places`: see `StepBuffers.fill`. `is_ahead`: the step is of no
        use without its tokens.
        """
        if self._world != self._seen():
            self._captured.clear()
            self._failed.clear()
            if self._draws is not None:
                self._draws.forget()
            self._new_graph = self._new_pool()
            self._world = self._seen()
        shape = self.shape_of(rows)
        if shape is None or shape in self._failed:
            return None
        touched = self._slots.expect(frozenset(adapter.slot.index for row in rows for adapter in row.adapters))
        found = self._captured.get(shape)
        if found is None or touched & ~found.modules:
            found = self._capture(shape)
        if found is None:
            return None
        spans, planned = found.buffers.fill(rows, places)
        if is_ahead and self._memory().has_failed(shape.num_logits, planned):
            return None
        found.graph.replay()
        self._num_replayed += 1
        drawn = self._memory().launch(shape.num_logits, planned, self._new_graph)
        return LaunchedStep(found.logits[: spans[-1].end], spans, drawn)

    def capture_all(self, max_model_len: int) -> None:
        """Captures the steps that are to be expected, so that no request waits for a capture: all sizes, up to widths
        of some thousands of tokens. Steps of longer rows are captured when they are first met.
        """
        start = time.perf_counter()
        for shape in self._expected(max_model_len):
            if self._capture(shape) is None and self._cannot_be_captured:
                self._failed.update(self._expected(max_model_len))  # no need to try them all
                break
        for num_logits, kinds in itertools.product(sorted({shape.num_logits for shape in self._captured}), ALL_KINDS):
            self._memory().capture(num_logits, kinds, self._new_graph)
        seconds = time.perf_counter() - start
        _log.info("CUDA graphs: %d captured in %.1f s, %d failed", self._num_captured, seconds, self._num_failed)

    def _expected(self, max_model_len: int) -> Iterator[GraphShape]:
        most = _power_of_two(self._max_num_rows)
        rows = {min(1 << power, self._max_num_rows) for power in range(most.bit_length())}
        beside_long = {min(self._rows_beside_long(count), self._max_num_rows) for count in rows}
        long_tokens = [_MIN_LONG_TOKENS << power for power in range((MAX_LONG_TOKENS // _MIN_LONG_TOKENS).bit_length())]
        narrowest, factor = _WIDTHS
        widths = [narrowest]
        if max_model_len > narrowest * self._cache.block_size:
            widths.append(narrowest * factor)
        for width, with_lora in itertools.product(widths, (False, True)):
            shapes = [GraphShape(count, 0, width, with_lora) for count in sorted(rows, reverse=True)]
            if self._model.reads_tiles:
                pairs = itertools.product(sorted(beside_long, reverse=True), reversed(long_tokens))
                shapes += [GraphShape(count, tokens, width, with_lora) for count, tokens in pairs]
            yield from (shape for shape in shapes if shape.num_rows * width <= _MAX_TABLE)

    @staticmethod
    def _rows_beside_long(num_rows: int) -> int:
        """The rows of one token that a graph with rows of several has, for so many: a power of four, from 16."""
        return max(16, num_rows << (num_rows.bit_length() + 1) % 2)

    def shape_of(self, rows: Sequence[Row]) -> GraphShape | None:
        """The sizes of the graph for these rows; None: no graph can run them.

        No row may ask for prompt log-probabilities, and each has at most one adapter, which only adds deltas to linear
        layers, in the base model's vocabulary. Rows of several tokens must be few and short enough.
        """
        if not all(map(self._is_simple, rows)):
            return None
        long = [row for row in rows if len(row.token_ids) > 1]
        num_short, num_tokens = len(rows) - len(long), sum(len(row.token_ids) for row in long)
        if num_short > self._max_num_rows or num_tokens > (MAX_LONG_TOKENS if self._model.reads_tiles else 0):
            return None
        # room for each of them, and for the positions that they sample
        room = TOKENS_PER_ROW * max(len(long), sum(row.num_sampled for row in long))
        num_long_tokens = max(_MIN_LONG_TOKENS, _power_of_two(max(num_tokens, room))) if long else 0
        if num_long_tokens > MAX_LONG_TOKENS:
            return None
        num_rows = _power_of_two(num_short)
        num_rows = min(self._rows_beside_long(num_rows) if long else num_rows, self._max_num_rows)
        (width, factor), longest = _WIDTHS, max(len(row.block_table) for row in rows)
        while width < longest:
            width *= factor
        if num_rows * width > _MAX_TABLE:
            return None
        return GraphShape(num_rows, num_long_tokens, width, any(row.adapters for row in rows))

    def _is_simple(self, row: Row) -> bool:
        if row.prompt_targets or len(row.adapters) > 1:
            return False
        return not any(self._slots.has_changes(adapter.slot.index) for adapter in row.adapters)

    def _seen(self) -> tuple[Any, ...]:
        """The pools whose addresses and sizes are in the graphs: when one changes, all graphs are captured anew."""
        return self._cache.num_resizes, self._slots.num_slots, self._slots.max_rank

    def _memory(self) -> DrawGraphs:
        """The logits of all graphs, and what is drawn from them: what they computed on the way is free for the next."""
        if self._draws is None:
            most = self._max_num_rows + MAX_LONG_TOKENS // TOKENS_PER_ROW
            self._draws = DrawGraphs(most, self._model.spec.vocab_size, self._cache.device)
        return self._draws

    def _capture(self, shape: GraphShape) -> _Captured | None:
        idle = [self._cache.spare_blocks(1, 1, kind)[0][0] for kind in range(self._cache.shape.num_kinds)]
        buffers = StepBuffers(shape, self._cache.block_size, idle, self._cache.device)
        buffers.fill(())
        graph, start = self._new_graph(), time.perf_counter()
        try:
            memory = self._memory()
            out, columns = memory.logits(shape.num_logits), memory.columns(shape.num_logits)

            def compute() -> Tensor:
                buffers.feed(memory.tokens())
                columns.copy_(buffers.draws)
                return out.copy_(self._model.logits(buffers.step()))

            logits = graph.capture(compute)
        except RuntimeError as error:  # out of memory, or a model whose code waits for the device
            self._failed.add(shape)
            self._num_failed += 1
            if not self._captured:
                self._new_graph = self._new_pool()
                self._cannot_be_captured = not is_out_of_memory(error)
            reason = str(error).partition("\n")[0]
            _log.warning("steps of %s are not captured as graphs from now on: %s", shape, reason)
            return None
        self._num_captured += 1
        self._capture_seconds += time.perf_counter() - start
        self._captured[shape] = _Captured(buffers, graph, logits, self._slots.expected)
        return self._captured[shape]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
