"""One pair of matrix products per segment: runs everywhere."""

from __future__ import annotations

from torch import Tensor

from lora_serve.model.lora.host_adapter import LinearDelta
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraTokens

PREFERENCE = 1


def why_not(slots: LoraSlots) -> str | None:
    """The reason why it cannot serve `slots`: none, it runs everywhere."""
    return None


class Kernel:
    reads_device_tokens = False

    def __init__(self, slots: LoraSlots) -> None:
        self._slots = slots

    def add(self, y: Tensor, x: Tensor, modules: tuple[int, ...], tokens: LoraTokens) -> None:
        """As in PEFT the delta is computed in the wider of the adapter's and the model's types."""
        for module, own in zip(modules, self._slots.columns(y, modules), strict=True):
            for segment in tokens.segments:
                delta = self._slots.delta(module, segment.slot)
                if delta is not None:
                    here = slice(segment.start, segment.end)
                    _add(own[here], x[here], delta, segment.scale)


def _add(y: Tensor, x: Tensor, delta: LinearDelta, scale: float) -> None:
    if delta.gain is not None:
        assert scale == 1.0, "only deltas can be scaled"
        y.mul_(delta.gain)
    if delta.shift is not None:
        y.add_(delta.shift, alpha=scale)
    if delta.a is None or delta.b is None:
        return
    wide = y.dtype if y.dtype.itemsize >= delta.a.dtype.itemsize else delta.a.dtype
    shrunk = x.to(wide) @ delta.a.to(wide).t()
    if wide == y.dtype:
        y.addmm_(shrunk, delta.b.to(wide), alpha=delta.scale * scale)
    else:
        y.copy_(y.to(wide).addmm_(shrunk, delta.b.to(wide), alpha=delta.scale * scale))
