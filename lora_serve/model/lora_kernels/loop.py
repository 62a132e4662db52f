"""One pair of matrix products per segment: best for long segments (prefill), runs everywhere."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lora_serve.model.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraSegment, LoraTokens


class Kernel:
    """See `LoraKernel`."""

    def __init__(self, slots: LoraSlots) -> None:
        self._slots = slots

    def add(self, y: Tensor, x: Tensor, module: int, tokens: LoraTokens) -> None:
        self.add_segments(y, x, module, tokens.segments)

    def add_segments(self, y: Tensor, x: Tensor, module: int, segments: Iterable[LoraSegment]) -> None:
        """`add` for some of the segments.

        As in PEFT the delta is computed in the wider of the adapter's and the model's types.
        """
        for segment in segments:
            weights = self._slots.weights(module, segment.slot)
            if weights is None:
                continue
            here = slice(segment.start, segment.end)
            wide = y.dtype if y.dtype.itemsize >= weights.a.dtype.itemsize else weights.a.dtype
            shrunk = x[here].to(wide) @ weights.a.to(wide).t()
            if wide == y.dtype:
                y[here].addmm_(shrunk, weights.b.to(wide), alpha=weights.scale)
            else:
                y[here] = (y[here].to(wide)).addmm_(shrunk, weights.b.to(wide), alpha=weights.scale).to(y.dtype)
