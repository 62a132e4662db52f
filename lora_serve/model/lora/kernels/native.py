"""The LoRA delta in C (`native/lora.c`): follows addresses to adapters where they lie."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.lora.host_adapter import SlotTables
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native import library
from lora_serve.model.step_context import LoraTokens

PREFERENCE = 2
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: list[Any] = [_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _SIZE, *[_ADDRESS] * 8]


def why_not(slots: LoraSlots) -> str | None:
    """The reason why the kernel cannot serve `slots`; None: it can."""
    return library.why_not(slots.device, torch.float32)


class Kernel:
    reads_device_tokens = False

    def __init__(self, slots: LoraSlots) -> None:
        self._functions: dict[torch.dtype, Any] = {}  # by the type of inputs
        self._slots = slots
        self._tables: SlotTables | None = None
        self._addresses: list[list[int]] = []

    def add(self, y: Tensor, x: Tensor, modules: tuple[int, ...], tokens: LoraTokens) -> None:
        if not tokens.segments:
            return
        if self._slots.tables is not self._tables:  # they have grown
            self._tables = self._slots.tables
            self._addresses = [self._tables.addresses(number) for number in self._slots.module_index.values()]
        known_x = x if library.why_not(x.device, x.dtype) is None else x.float()
        known_x = known_x if known_x.stride(1) == 1 else known_x.contiguous()
        wide_y = y if y.dtype == torch.float32 else y.float()
        function, place = self._function(known_x.dtype), wide_y.data_ptr()
        for module in modules:
            out_features = self._slots.shapes[module].out_features
            function(
                known_x.data_ptr(), known_x.stride(0), place, wide_y.stride(0), x.shape[1], out_features,
                tokens.pieces.data_ptr(), len(tokens.pieces),
                None if tokens.weights is None else tokens.weights.data_ptr(), *self._addresses[module],
            )  # fmt: skip
            place += out_features * wide_y.itemsize
        if wide_y is not y:
            y.copy_(wide_y)

    def _function(self, dtype: torch.dtype) -> Any:
        if dtype not in self._functions:
            function = library.load(dtype).lora_add
            function.argtypes, function.restype = _ARGUMENTS, None
            self._functions[dtype] = function
        return self._functions[dtype]
