"""An adapter in host memory, ready for a device slot: what it does to each module, the base's part worked in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_serve.model.changes import Change


@dataclass(frozen=True, slots=True)
class LinearDelta:
    """One linear layer's y [n, out] = gain * y + shift + scale * (x [n, in] A^T) B; None: one, or zero.

    gain is DoRA's magnitude over norm, shift what trained biases add.
    """

    a: Tensor | None  # [rank, in_features], contiguous
    b: Tensor | None  # [rank, out_features], contiguous, of a's dtype
    scale: float  # not folded into a or b: folding would round twice in bfloat16
    gain: Tensor | None = None  # [out_features] float32
    shift: Tensor | None = None  # [out_features] float32

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.a, self.b, self.gain, self.shift) if t is not None)

    def to(self, device: torch.device) -> LinearDelta:
        """The same on a device; on the CPU the same tensors."""
        moved = (None if t is None else t.to(device) for t in (self.a, self.b, self.gain, self.shift))
        a, b, gain, shift = moved
        return LinearDelta(a, b, self.scale, gain, shift)


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """One adapter version in host memory, by module path as in ModelSpec."""

    digest: str
    name: str
    rank: int  # the largest of any module
    deltas: Mapping[str, LinearDelta]
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)  # in the order they apply
    vocab_size: int = 0  # of its own embedding and output head; 0: the base's

    @property
    def num_bytes(self) -> int:
        """Host memory of its own."""
        changes = sum(change.num_bytes for table in self.changes.values() for change in table)
        return changes + sum(delta.num_bytes for delta in self.deltas.values())
