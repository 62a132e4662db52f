"""The tokens of captured steps, drawn by graphs of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.core.batch import Row
from lora_serve.model.runner.draws import COLDEST, DrawColumns, DrawKinds, draw_captured, uniform
from lora_serve.model.runner.packing import LogitSpan
from lora_serve.model.runner.sampler import SampledToken, is_truncated
from lora_serve.model.system.device_memory import copy_to_host

_log = logging.getLogger(__name__)
NUM_COLUMNS = len(DrawColumns._fields)
ALL_KINDS = tuple(DrawKinds(whole, truncated) for whole in (False, True) for truncated in (False, True))


class Graph(Protocol):
    """As `graphs.CudaGraph`."""

    def capture(self, call: Callable[[], Tensor]) -> Tensor: ...

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PlannedDraws:
    """The rows of a step whose tokens a graph can draw, with the places of their logits."""

    rows: list[tuple[Row, LogitSpan]]
    kinds: DrawKinds


def plan_draws(rows: Sequence[Row], spans: Sequence[LogitSpan], columns: npt.NDArray[np.float64]) -> PlannedDraws:
    """Fills `columns` [6, positions], which are zero, for the rows that a graph can draw; the others are left to the
    host, which finds their logits as they are.
    """
    columns[DrawColumns._fields.index("temperature")] = 1.0
    planned: list[tuple[Row, LogitSpan]] = []
    warm: list[tuple[Any, ...]] = []  # place, seed, counter; then the columns but for the number
    for row, span in zip(rows, spans, strict=True):
        sample = row.sample
        if sample is None or not sample.is_plain:
            continue
        planned.append((row, span))
        params, first = sample.params, sample.num_output_tokens - span.start
        if params.temperature >= COLDEST:
            kind = 2 if is_truncated(sample) else 1
            own = (kind, params.temperature, params.top_k, params.top_p, params.min_p)
            warm += [(place, sample.seed, first + place, *own) for place in range(span.start, span.end)]
    if not warm:
        return PlannedDraws(planned, DrawKinds(False, False))
    places, seeds, counters, kinds, *others = zip(*warm, strict=True)
    columns[:, list(places)] = np.array([kinds, uniform(seeds, counters).numpy(), *others])
    return PlannedDraws(planned, DrawKinds(1 in kinds, 2 in kinds))


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens that a graph draws, on their way to the host."""

    rows: list[tuple[Row, LogitSpan]]
    _wait: Callable[[], list[Tensor]]

    def wait(self) -> dict[int, list[SampledToken]]:
        """The tokens of each row's positions by the row's id, once the device has come so far; without the rows that
        the host has to draw, as they may keep more tokens than a graph looks at.
        """
        tokens, is_final, is_number = (column.tolist() for column in self._wait()[0])
        found: dict[int, list[SampledToken]] = {}
        for row, span in self.rows:
            own = range(span.start, span.end)
            if all(is_final[i] or not is_number[i] for i in own):
                found[row.sequence_id] = [SampledToken(tokens[i], None, bool(is_number[i])) for i in own]
        return found


class DrawGraphs:
    """Draws captured over the logits of a step: a graph for each number of positions and for what its rows ask for.

    So forward passes are not captured again for that, and a step of rows without a temperature sums up nothing. All
    steps share one memory of logits, columns and tokens.
    """

    def __init__(self, max_positions: int, vocab_size: int, device: torch.device) -> None:
        self._logits = torch.empty(max_positions, vocab_size, device=device)
        self._columns = torch.zeros(NUM_COLUMNS * max_positions, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(3 * max_positions, dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, DrawKinds], Graph | None] = {}  # None: it could not be

    def logits(self, num_positions: int) -> Tensor:
        """[num_positions, vocab]: where a step puts them."""
        return self._logits[:num_positions]

    def columns(self, num_positions: int) -> Tensor:
        """[6, num_positions] float64: where a step puts what is to be drawn."""
        return self._columns[: NUM_COLUMNS * num_positions].view(NUM_COLUMNS, -1)

    def tokens(self) -> Tensor:
        """[positions] int64: the tokens that the last step drew."""
        return self._tokens

    def forget(self) -> None:
        """Drops all graphs, before memory that they share with others is given up."""
        self._captured.clear()

    def has_failed(self, num_positions: int, planned: PlannedDraws) -> bool:
        """True if no graph draws these tokens, as it could not be captured."""
        return bool(planned.rows) and self._captured.get((num_positions, planned.kinds), True) is None

    def launch(self, num_positions: int, planned: PlannedDraws, new_graph: Callable[[], Graph]) -> DrawnTokens | None:
        """Draws the tokens of `planned`, once the logits and columns are there; None: that is left to the host."""
        if not planned.rows:
            return None
        graph = self.capture(num_positions, planned.kinds, new_graph)
        if graph is None:
            return None
        graph.replay()
        return DrawnTokens(planned.rows, copy_to_host(self._out(num_positions)))

    def capture(self, num_positions: int, kinds: DrawKinds, new_graph: Callable[[], Graph]) -> Graph | None:
        """The graph for these, captured if it is not there yet; None: it cannot be."""
        key = (num_positions, kinds)
        if key not in self._captured:
            logits, out = self.logits(num_positions), self._out(num_positions)
            columns = DrawColumns(*self.columns(num_positions))
            graph = new_graph()
            try:
                graph.capture(lambda: out.copy_(draw_captured(logits, columns, kinds)))
                self._captured[key] = graph
            except RuntimeError as error:
                self._captured[key] = None
                reason = str(error).partition("\n")[0]
                _log.warning("tokens of %d positions are not drawn by a graph from now on: %s", num_positions, reason)
        return self._captured[key]

    def _out(self, num_positions: int) -> Tensor:
        """[3, num_positions] int64, see `draw_captured`."""
        return self._tokens[: 3 * num_positions].view(3, -1)
