"""The slots' tables on the device: one record per slot and linear layer, rewritten in place when a slot changes."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_serve.model.lora.host_adapter import SlotColumns

RECORD_WORDS = 8  # a, b, gain, shift: addresses; rank; scale: float32's bits; 1 if a and b are bfloat16; 0


class SlotRecords:
    """[num_slots, num_modules, RECORD_WORDS] int64, 64 bytes per record: what a program needs of a layer's adapter.

    A slot's new content is one copy that joins the queue of the stream it is made on; the memory stays where it is,
    so that captured graphs go on reading it. Only growth moves it, which `tensor` shows by being another object.
    """

    def __init__(self, num_slots: int, num_modules: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_slots, num_modules, RECORD_WORDS, dtype=torch.int64, device=device)

    def write(self, slot: int, columns: SlotColumns) -> None:
        """`columns`: of tensors on this device."""
        words = packed(columns)
        self.tensor[slot].copy_(words.pin_memory() if self.tensor.is_cuda else words, non_blocking=True)

    def clear(self, slot: int) -> None:
        self.tensor[slot].zero_()

    def widen(self, num_slots: int) -> None:
        wide = self.tensor.new_zeros(num_slots, *self.tensor.shape[1:])
        wide[: len(self.tensor)] = self.tensor
        self.tensor = wide


def packed(columns: SlotColumns) -> Tensor:
    """[num_modules, RECORD_WORDS] int64."""
    words = torch.zeros(len(columns.a), RECORD_WORDS, dtype=torch.int64)
    for word, column in enumerate((columns.a, columns.b, columns.gain, columns.shift, columns.rank)):
        words[:, word] = column
    words[:, 5] = columns.scale.view(torch.int32)
    words[:, 6] = columns.is_bfloat16
    return words
