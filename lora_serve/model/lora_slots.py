"""The pool of device slots: adapters' weights by slot index, at their true rank. Who owns which slot is decided in
`engine/slots.py`; this file only stores bytes and refuses a row whose slot has changed under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import InternalError
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.changes import Change
from lora_serve.model.host_adapter import HostAdapter, LinearDelta


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Where each slot's weights lie, for kernels that follow addresses; every table is [num_modules, num_slots]."""

    a: Tensor  # int64 addresses of A [rank, in]; 0: nothing of low rank
    b: Tensor  # int64 addresses of B [rank, out]
    gain: Tensor  # int64 addresses of gain [out], 0: one
    shift: Tensor  # int64 addresses of shift [out], 0: zero
    rank: Tensor  # int32
    scale: Tensor  # float32
    is_bfloat16: Tensor  # int32, of A and B

    @staticmethod
    def empty(num_modules: int, num_slots: int) -> SlotTables:
        shape = (num_modules, num_slots)
        a, b, gain, shift = (torch.zeros(shape, dtype=torch.int64) for _ in range(4))
        return SlotTables(
            a,
            b,
            gain,
            shift,
            rank=torch.zeros(shape, dtype=torch.int32),
            scale=torch.zeros(shape, dtype=torch.float32),
            is_bfloat16=torch.zeros(shape, dtype=torch.int32),
        )

    def set(self, module: int, slot: int, delta: LinearDelta) -> None:
        self.a[module, slot] = _address(delta.a)
        self.b[module, slot] = _address(delta.b)
        self.gain[module, slot] = _address(delta.gain)
        self.shift[module, slot] = _address(delta.shift)
        self.rank[module, slot] = delta.rank
        self.scale[module, slot] = delta.scale
        self.is_bfloat16[module, slot] = int(delta.a is not None and delta.a.dtype == torch.bfloat16)

    def clear(self, slot: int) -> None:
        for addresses in (self.a, self.b, self.gain, self.shift):
            addresses[:, slot] = 0


class LoraSlots:
    """`num_slots` adapters, each a mapping from module to what the adapter does there.

    On the CPU a slot refers to the host tensors (device and host memory are the same bytes); on a GPU it copies.
    """

    def __init__(self, linears: Mapping[str, LinearShape], num_slots: int, device: torch.device) -> None:
        self.module_index = {name: index for index, name in enumerate(linears)}
        self.tables = SlotTables.empty(len(linears), num_slots)
        self.device = device
        self._owners: list[SlotRef | None] = [None] * num_slots
        self._deltas: list[dict[int, LinearDelta]] = [{} for _ in range(num_slots)]
        self._changes: dict[str, dict[int, tuple[Change, ...]]] = {}  # module path -> slot
        self._vocab_sizes = [0] * num_slots

    def load(self, slot: SlotRef, adapter: HostAdapter) -> None:
        """Put `adapter` into the slot in place of whatever was there."""
        assert adapter.digest == slot.digest, "the table and the pool disagree about a digest"
        self.clear(slot.index)
        for path, host_delta in adapter.deltas.items():
            delta, index = host_delta.to(self.device), self.module_index[path]
            self._deltas[slot.index][index] = delta
            self.tables.set(index, slot.index, delta)
        for path, changes in adapter.changes.items():
            self._changes.setdefault(path, {})[slot.index] = tuple(change.to(self.device) for change in changes)
        self._vocab_sizes[slot.index] = adapter.vocab_size
        self._owners[slot.index] = slot

    def clear(self, index: int) -> None:
        """Forget the slot's weights; their bytes are free when nothing else refers to them."""
        self._owners[index] = None
        self._deltas[index] = {}
        self._vocab_sizes[index] = 0
        self.tables.clear(index)
        for table in self._changes.values():
            table.pop(index, None)

    def check(self, slot: SlotRef) -> None:
        """Raise InternalError unless the slot still holds exactly this digest in this generation."""
        if self._owners[slot.index] != slot:
            raise InternalError(
                f"adapter slot {slot.index} no longer holds {slot.digest} of generation {slot.generation}"
            )

    def delta(self, module: int, slot: int) -> LinearDelta | None:
        """The slot's delta of a linear layer, None if it does not adapt it."""
        return self._deltas[slot].get(module)

    def vocab_size(self, slot: int) -> int:
        """How many tokens the slot's adapter knows; 0: those of the base model."""
        return self._vocab_sizes[slot]

    def changes_of(self, path: str) -> Mapping[int, tuple[Change, ...]]:
        """What each slot changes in a module: a table that stays the same object and is kept up to date."""
        return self._changes.setdefault(path, {})


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
