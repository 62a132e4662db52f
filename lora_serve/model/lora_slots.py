"""The pool of device slots: LoRA weights by slot index, at their true rank. Who owns which slot is decided in
`engine/slots.py`; this file only stores bytes and refuses a row whose slot has changed under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.adapters.weights import HostAdapter, LoraModule
from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import InternalError
from lora_serve.core.model_spec import LinearShape


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Where each slot's weights lie, for kernels that follow addresses; every table is [num_modules, num_slots]."""

    a: Tensor  # int64 addresses of A [rank, in]; 0: the slot does not target the module
    b: Tensor  # int64 addresses of B [rank, out]
    rank: Tensor  # int32
    scale: Tensor  # float32
    is_bfloat16: Tensor  # int32

    @staticmethod
    def empty(num_modules: int, num_slots: int) -> SlotTables:
        shape = (num_modules, num_slots)
        return SlotTables(
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape, dtype=torch.int32),
            torch.zeros(shape, dtype=torch.float32),
            torch.zeros(shape, dtype=torch.int32),
        )

    def set(self, module: int, slot: int, weights: LoraModule) -> None:
        self.a[module, slot] = weights.a.data_ptr()
        self.b[module, slot] = weights.b.data_ptr()
        self.rank[module, slot] = weights.a.shape[0]
        self.scale[module, slot] = weights.scale
        self.is_bfloat16[module, slot] = int(weights.a.dtype == torch.bfloat16)

    def clear(self, slot: int) -> None:
        self.a[:, slot] = 0
        self.b[:, slot] = 0


class LoraSlots:
    """`num_slots` adapters, each a mapping from module to its A, B and scale.

    On the CPU a slot refers to the host tensors (device and host memory are the same bytes); on a GPU it copies.
    """

    def __init__(self, linears: Mapping[str, LinearShape], num_slots: int, device: torch.device) -> None:
        self.module_index = {name: index for index, name in enumerate(linears)}
        self.tables = SlotTables.empty(len(linears), num_slots)
        self.device = device
        self._owners: list[SlotRef | None] = [None] * num_slots
        self._weights: list[dict[int, LoraModule]] = [{} for _ in range(num_slots)]

    def load(self, slot: SlotRef, adapter: HostAdapter) -> None:
        """Put `adapter` into the slot in place of whatever was there."""
        assert adapter.digest == slot.digest, "the table and the pool disagree about a digest"
        self.clear(slot.index)
        for name, module in adapter.modules.items():
            weights = LoraModule(module.a.to(self.device), module.b.to(self.device), module.scale)
            index = self.module_index[name]
            self._weights[slot.index][index] = weights
            self.tables.set(index, slot.index, weights)
        self._owners[slot.index] = slot

    def clear(self, index: int) -> None:
        """Forget the slot's weights; their bytes are free when nothing else refers to them."""
        self._owners[index] = None
        self._weights[index] = {}
        self.tables.clear(index)

    def check(self, slot: SlotRef) -> None:
        """Raise InternalError unless the slot still holds exactly this digest in this generation."""
        if self._owners[slot.index] != slot:
            raise InternalError(
                f"adapter slot {slot.index} no longer holds {slot.digest} of generation {slot.generation}"
            )

    def weights(self, module: int, slot: int) -> LoraModule | None:
        """The slot's weights for a module, None if it does not target it."""
        return self._weights[slot].get(module)
