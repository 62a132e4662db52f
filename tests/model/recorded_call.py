"""A graph for tests without a GPU: torch's operations as they were called, played again on the very same tensors.

Like a CUDA graph it knows nothing of Python: a value that was computed outside, or remembered from another step, stays
what it was. What would make the host wait is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")


class RecordedCall(TorchDispatchMode):
    """Stands for `CudaGraph`. `launches`: of Triton programs, which torch does not see (`watch`)."""

    def __init__(self, log: list[RecordedCall] | None = None) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[[], Any], Any]] = []
        self.num_replays = 0
        if log is not None:
            log.append(self)

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        call()
        with self:
            return call()

    def replay(self) -> None:
        self.num_replays += 1
        for step, before in self._steps:
            for old, new in zip(tree_leaves(before), tree_leaves(step()), strict=True):
                if isinstance(old, Tensor) and old.layout is torch.strided and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def launch(self, call: Callable[[], None]) -> None:
        with _disable_current_modes():
            call()
        self._steps.append((call, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _WAITS:
            raise RuntimeError(f"{func} makes the host wait, which cannot be recorded")
        found = func(*args, **(kwargs or {}))
        self._steps.append((lambda: func(*args, **(kwargs or {})), found))
        return found


class WatchedPrograms:
    """Stands for a module of Triton programs and tells the recorder that runs of each launch."""

    def __init__(self, programs: Any, recorders: list[RecordedCall]) -> None:
        self._programs, self._recorders = programs, recorders

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._programs, name)
        return _Launcher(found, self._recorders) if hasattr(found, "__getitem__") else found


class _Launcher:
    def __init__(self, program: Any, recorders: list[RecordedCall]) -> None:
        self._program, self._recorders = program, recorders

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            from torch.utils._python_dispatch import _get_current_dispatch_mode

            mode = _get_current_dispatch_mode()
            call = lambda: self._program[grid](*args, **kwargs)  # noqa: E731
            if isinstance(mode, RecordedCall):
                mode.launch(call)
            else:
                call()

        return launch
