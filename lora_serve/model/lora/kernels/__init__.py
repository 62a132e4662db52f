"""The LoRA delta of a mixed batch: one file per kernel, one contract test for all."""

from __future__ import annotations

import importlib
from typing import Protocol

from torch import Tensor

from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step.step_context import LoraTokens


class LoraKernel(Protocol):
    """`file.py` holds `class Kernel` with this constructor and method; the file's name is the config value."""

    reads_device_tokens: bool  # of a step only `LoraTokens.on_device`, so that a captured graph can hold its launches

    def __init__(self, slots: LoraSlots) -> None: ...

    def add(self, y: Tensor, x: Tensor, module: int, tokens: LoraTokens) -> None:
        """y[i] = gain[s] * y[i] + t[i] * (shift[s] + scale[s] * (x[i] A[s]^T) B[s]) in place.

        s is token i's slot and t[i] its segment's scale; tokens without a slot, and those whose slot leaves this
        module alone, stay untouched. y [num_tokens, out], x [num_tokens, in] of the model's dtype; A [rank, in],
        B [rank, out], gain and shift [out] per slot, see `LinearDelta`. A gain comes with t = 1 only.
        """


def create_kernel(name: str, slots: LoraSlots) -> LoraKernel:
    """The kernel of file `name`; "auto": the first of triton, native, loop that runs here. Raises ConfigError."""
    if name == "auto":
        on_cuda = slots.device.type == "cuda"
        name = (
            "triton" if on_cuda and _can_serve("triton", slots) else "native" if _can_serve("native", slots) else "loop"
        )
    module = importlib.import_module(f"{__name__}.{name}")
    kernel: LoraKernel = module.Kernel(slots)
    return kernel


def _can_serve(name: str, slots: LoraSlots) -> bool:
    return importlib.import_module(f"{__name__}.{name}").why_not(slots) is None
