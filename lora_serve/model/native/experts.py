"""Stacks of experts' weights laid out for products, and a whole mixture of them in one call (`native/experts.c`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_serve.model.native import library
from lora_serve.model.native.layer_kernels import Gate
from lora_serve.model.native.operators import PackedLinear

_ADDRESS, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True)
class Layout:
    """How a model keeps the weight of an expert that lies as [out, in] here."""

    is_transposed: bool = False  # as [in, out]
    order: Tensor | None = None  # the outputs in the order in which they lie here; None: in that of the model

    def native(self, weight: Tensor) -> Tensor:
        """weight [..., out, in] or transposed -> [..., out, in] as it lies here."""
        weight = weight.mT if self.is_transposed else weight
        return weight if self.order is None else weight[..., self.order, :]

    def own(self, weight: Tensor) -> Tensor:
        """The inverse: weight [..., out, in] as the model keeps it."""
        weight = weight if self.order is None else weight[..., self._inverse, :]
        return weight.mT if self.is_transposed else weight

    def outputs(self, y: Tensor) -> Tensor:
        """y [..., out] in the order of the model."""
        return y if self.order is None else y[..., self._inverse]

    @functools.cached_property
    def _inverse(self) -> Tensor:
        assert self.order is not None
        return self.order.argsort()


AS_IS = Layout()
PRODUCTS: Any = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)  # by a weight [in, out]


class PackedMatrix:
    """One expert's weight, for a model that keeps it by `layout`. To torch it is an argument that overrides functions,
    as `LowRankWeight` is: products multiply by it as it lies, any other function gets a plain copy.
    """

    def __init__(self, packed: PackedLinear, layout: Layout = AS_IS) -> None:
        self.packed, self.layout = packed, layout
        size = packed.out_features, packed.in_features
        self.shape, self.dtype = torch.Size(size[::-1] if layout.is_transposed else size), packed.dtype
        self.device = packed.panels.device
        self.products = PRODUCTS if layout.is_transposed else (F.linear,)
        self._others: dict[torch.dtype, PackedMatrix] = {}

    def type(self, dtype: torch.dtype) -> PackedMatrix:
        """The weight for inputs of another type."""
        if dtype == self.dtype:
            return self
        if dtype not in self._others:
            self._others[dtype] = PackedMatrix(PackedLinear.of(self.packed.dense().to(dtype)), self.layout)
        return self._others[dtype]

    def float(self) -> PackedMatrix:
        """The weight for inputs of float32."""
        return self.type(torch.float32)

    def dense(self) -> Tensor:
        """A plain copy, as the model keeps it."""
        return self.layout.own(self.packed.dense())

    def __getattr__(self, name: str) -> Any:
        """What a model asks of its weight: casts, products, views."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...], keywords: Any = None
    ) -> Any:
        x, own, bias, *_ = (*arguments, None, None)
        if isinstance(own, PackedMatrix) and function in own.products and not keywords:
            y = own.layout.outputs(own.packed(x.to(own.packed.dtype), None))
            return (y if bias is None else y + bias).to(x.dtype)
        named = {name: _as_tensor(value) for name, value in (keywords or {}).items()}
        return function(*map(_as_tensor, arguments), **named)


def _as_tensor(value: Any) -> Any:
    return value.dense() if isinstance(value, PackedMatrix) else value


class PackedStack:
    """The weights of all experts of a module, in the place of the parameter that they were."""

    def __init__(self, weight: Tensor, layout: Layout = AS_IS) -> None:
        """weight [experts, out, in], or as `layout` says, of a type that the kernels know. Raises OSError."""
        self.shape, self.device, self.layout = weight.shape, weight.device, layout
        rows = layout.native(weight)
        count, self.out_features, self.in_features = rows.shape
        outputs = library.load(weight.dtype).panel_outputs()
        missing = -self.out_features % outputs
        whole = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        self._all = PackedLinear.of(whole.reshape(-1, self.in_features))
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

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        return len(self.shape)

    def __getitem__(self, expert: int | Tensor) -> PackedMatrix:
        first = int(expert) * self._panels
        own = self._all.panels[first : first + self._panels]
        return PackedMatrix(replace(self._all, panels=own, out_features=self.out_features), self.layout)

    def dense(self) -> Tensor:
        """The plain weights, as the model keeps them: a copy."""
        return torch.stack([self[expert].dense() for expert in range(len(self))])


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
        """gate_up of 2 * inner outputs for each expert, gate before up; down of `hidden`; both biases float32."""
        kernels = library.load(gate_up.dtype)
        kernels.experts.argtypes = [*[_ADDRESS] * 2, _SIZE, *[_ADDRESS] * 2, _SIZE, *[_ADDRESS] * 2]
        kernels.experts.restype = None
        kernels.experts_room.argtypes, kernels.experts_room.restype = [_ADDRESS, _SIZE], _SIZE
        count, hidden, inner = len(down), down.out_features, down.in_features
        found = len(gate_up), gate_up.out_features, gate_up.in_features
        assert found == (count, 2 * inner, hidden), "gate and up are of other sizes than down"
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
