"""Stacks of experts' weights laid out for products, and a whole mixture of them in one call (`native/experts.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_serve.model.native import library
from lora_serve.model.native.layer_kernels import Gate
from lora_serve.model.native.operators import PackedLinear

_ADDRESS, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class PackedMatrix:
    """One expert's weight [out, in]. To torch it is an argument that overrides functions, as `LowRankWeight` is:
    `F.linear` multiplies by it as it lies, any other function gets a plain copy.
    """

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed
        self.shape, self.dtype = torch.Size((packed.out_features, packed.in_features)), packed.dtype
        self.device = packed.panels.device
        self._others: dict[torch.dtype, PackedMatrix] = {}

    def type(self, dtype: torch.dtype) -> PackedMatrix:
        """The weight for inputs of another type."""
        if dtype == self.dtype:
            return self
        if dtype not in self._others:
            self._others[dtype] = PackedMatrix(PackedLinear.of(self.packed.dense().to(dtype)))
        return self._others[dtype]

    def float(self) -> PackedMatrix:
        """The weight for inputs of float32."""
        return self.type(torch.float32)

    def __getattr__(self, name: str) -> Any:
        """What a model asks of its weight: casts, products, views."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.packed.dense(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...], keywords: Any = None
    ) -> Any:
        x, own, bias, *_ = (*arguments, None, None)
        if function is F.linear and isinstance(own, PackedMatrix) and not keywords:
            weight = own.packed
            return weight(x.to(weight.dtype), None if bias is None else bias.float()).to(x.dtype)
        named = {name: _as_tensor(value) for name, value in (keywords or {}).items()}
        return function(*map(_as_tensor, arguments), **named)


def _as_tensor(value: Any) -> Any:
    return value.packed.dense() if isinstance(value, PackedMatrix) else value


class PackedStack:
    """The weights [experts, out, in] of all experts of a module, in the place of the parameter that they were."""

    def __init__(self, weight: Tensor) -> None:
        """Lays out a weight of a type that the kernels know. Raises OSError."""
        self.shape, self.device = weight.shape, weight.device
        count, out, width = weight.shape
        outputs = library.load(weight.dtype).panel_outputs()
        whole = F.pad(weight, (0, 0, 0, -out % outputs)) if out % outputs else weight
        self._all = PackedLinear.of(whole.reshape(-1, width))
        self.dtype = self._all.dtype
        self._panels = len(self._all.panels) // count  # of each expert

    @property
    def words(self) -> int:
        """4-byte words from one expert to the next."""
        return self._panels * self._all.panels.shape[1]

    @property
    def packed(self) -> PackedLinear:
        """All experts, as one weight."""
        return self._all

    def dim(self) -> int:
        return len(self.shape)

    def __getitem__(self, expert: int | Tensor) -> PackedMatrix:
        first = int(expert) * self._panels
        own = self._all.panels[first : first + self._panels]
        return PackedMatrix(replace(self._all, panels=own, out_features=self.shape[1]))

    def dense(self) -> Tensor:
        """The plain weights: a copy."""
        return torch.stack([self[expert].packed.dense() for expert in range(self.shape[0])])


class _Experts(ctypes.Structure):
    _fields_ = (
        *((name, _ADDRESS) for name in ("up_panels", "down_panels")),
        *((name, _SIZE) for name in ("up_kind", "down_kind", "up_words", "down_words")),
        *((name, _SIZE) for name in ("hidden", "inner", "count", "activation")),
        *((name, _ADDRESS) for name in ("up_bias", "down_bias")),
        *((name, _FLOAT) for name in ("alpha", "limit", "offset")),
    )


class NativeExperts:
    """All experts of a module: gate and up as one product, each expert's rows together."""

    def __init__(
        self, gate_up: PackedStack, down: PackedStack, gate: Gate, biases: tuple[Tensor, Tensor] | None
    ) -> None:
        """gate_up [experts, 2 * inner, hidden], gate before up; down [experts, hidden, inner]; both biases float32."""
        kernels = library.load(gate_up.dtype)
        kernels.experts.argtypes = [*[_ADDRESS] * 2, _SIZE, *[_ADDRESS] * 2, _SIZE, *[_ADDRESS] * 2]
        kernels.experts.restype = None
        kernels.experts_room.argtypes, kernels.experts_room.restype = [_ADDRESS, _SIZE], _SIZE
        count, hidden, inner = down.shape
        assert gate_up.shape == (count, 2 * inner, hidden), "gate and up are of other sizes than down"
        self._kernels, self.dtype = kernels, gate_up.dtype
        self._kept = gate_up, down, biases
        up_bias, down_bias = (None, None) if biases is None else (one.data_ptr() for one in biases)
        self._experts = _Experts(
            gate_up.packed.panels.data_ptr(), down.packed.panels.data_ptr(), gate_up.packed.kind, down.packed.kind,
            gate_up.words, down.words, hidden, inner, count, gate.number, up_bias, down_bias,
            gate.alpha, gate.limit, gate.offset,
        )  # fmt: skip
        self._address = ctypes.addressof(self._experts)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden] of the kernels' type, or float32, which is rounded to it; chosen [tokens, top_k] int64,
        weights [tokens, top_k] -> [tokens, hidden] of the kernels' type. A row's bits do not depend on other rows.
        """
        own, chosen, weights = x.to(self.dtype).contiguous(), chosen.contiguous(), weights.float().contiguous()
        tokens, top_k = chosen.shape
        room = torch.empty(self._kernels.experts_room(self._address, tokens * top_k), dtype=torch.uint8)
        y = torch.empty_like(own)
        self._kernels.experts(
            self._address, own.data_ptr(), tokens, chosen.data_ptr(), weights.data_ptr(), top_k, room.data_ptr(),
            y.data_ptr(),
        )  # fmt: skip
        return y
