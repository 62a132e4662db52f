"""A forward pass recorded once and played again: the seam between the step and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """Holds what a call enqueued. All that the call reads must stay where it is; only values may change."""

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        """Record `call`. Returns the tensor into which every replay writes; it holds nothing yet."""

    def replay(self) -> None:
        """Everything once more, with the values that its inputs have now."""


class CudaGraph:
    """See `Graph`. Not run on a GPU yet: tests of the CPU record torch's operations in its place."""

    def __init__(self, pool: Any) -> None:
        """`pool`: memory that graphs share which never run at the same time, see `graph_pool`."""
        self._pool = pool
        self._graph: Any = torch.cuda.CUDAGraph()

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        """See `Graph`. Raises RuntimeError if the call makes the host wait, which cannot be recorded."""
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            call()  # compiles, makes workspaces: nothing of that may happen while it is recorded
        here.wait_stream(side)
        # thread_local: loaders pin memory on their own threads meanwhile
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return call()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


def graph_pool() -> Any:
    """A name for memory that CUDA graphs share."""
    return torch.cuda.graph_pool_handle()
