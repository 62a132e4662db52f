"""The LoRA delta of a mixed batch. The folder is the list of kernels: the name of a file is a value of --lora-kernel.

A new kernel is a new file, named nowhere else: `class Kernel` (see `LoraKernel`) and what `model/__init__.py` asks of
every file. The contract tests run over all files (tests/contracts/test_lora_kernel.py).
"""

from __future__ import annotations

import sys
from typing import Protocol

from torch import Tensor

from lora_serve.model import load_backend
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraTokens


class LoraKernel(Protocol):
    """The class that a file of this folder provides as `Kernel`."""

    reads_device_tokens: bool  # of a step only `LoraTokens.on_device`, so that a captured graph can hold its launches

    def __init__(self, slots: LoraSlots) -> None: ...

    def add(self, y: Tensor, x: Tensor, modules: tuple[int, ...], tokens: LoraTokens) -> None:
        """y[i] = gain[s] * y[i] + t[i] * (shift[s] + scale[s] * (x[i] A[s]^T) B[s]) in place, for each of the modules
        on its own columns of y.

        s is token i's slot and t[i] its segment's scale; tokens without a slot, and those whose slot leaves a
        module alone, stay untouched. The modules read the same x [num_tokens, in]; y [num_tokens, sum of out] holds
        their outputs side by side (`LoraSlots.columns`), both of the model's dtype. A [rank, in], B [rank, out], gain
        and shift [out] per slot and module, see `LinearDelta`. A gain comes with t = 1 only.
        """

    def add_pairs(self, y: Tensor, x: Tensor, module: int, slots: Tensor, scales: Tensor, experts: Tensor) -> None:
        """The same for pairs of a token and an expert e of a stack: y[i] += t[i] * scale[s] * (x[r] A[s, e]^T) B[s, e].

        y [num_pairs, out]; slots, t = scales and experts [num_pairs]; x has a row r for one pair, or for as many that
        follow one another. Only of kernels that `reads_device_tokens`.
        """


def create_kernel(name: str, slots: LoraSlots) -> LoraKernel:
    """The kernel of file `name`; "auto": the preferred one of those that run here. Raises ConfigError."""
    kernel: LoraKernel = load_backend(sys.modules[__name__], name, "--lora-kernel", slots).Kernel(slots)
    return kernel
