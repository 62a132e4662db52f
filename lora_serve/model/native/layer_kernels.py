"""The compiled kernels between the products of a layer, as functions of tensors (`native/layers.c`)."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.kv_format import PLAIN, KVFormat
from lora_serve.model.native import library

_ADDRESS, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_NORM: list[Any] = [_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _FLOAT, _FLOAT, _SIZE, _ADDRESS]
_ROTATE: list[Any] = [
    *[_ADDRESS, _SIZE] * 3, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _ADDRESS,
    _ADDRESS,
]  # fmt: skip
_LATENT: list[Any] = [
    *[_ADDRESS, _SIZE] * 3, *[_SIZE] * 5, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS,
]  # fmt: skip
MOST_ROTATED = 512  # numbers of a head in latent attention
ACTIVATIONS = ("silu", "gelu_tanh")  # in the order of the enum
CLAMPED = "clamped"  # the gate of gpt-oss's kind, which comes after these
_SUMS, _REALS = range(2)  # likewise


@dataclass(frozen=True, slots=True)
class Gate:
    """The function between the products of a gated layer: act(gate) * up; if clamped, with g = min(gate, limit),
    (clamp(up, limit) + offset) * g * sigmoid(alpha * g).
    """

    activation: str  # of ACTIVATIONS, or CLAMPED
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    @property
    def number(self) -> int:
        """The activation's place in the enum."""
        return (*ACTIVATIONS, CLAMPED).index(self.activation)


class _Clamps(ctypes.Structure):
    _fields_ = (("alpha", _FLOAT), ("limit", _FLOAT), ("offset", _FLOAT))


_GATED: list[Any] = [_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, _Clamps, _ADDRESS]


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The functions of the compiled kernels for models of one type."""

    dtype: torch.dtype
    _rms_norm: Any
    _gated: Any
    _rotate_store: Any
    _latent_store: Any

    @staticmethod
    def load(dtype: torch.dtype) -> LayerKernels:
        """Loads the kernels. Raises OSError, see `library.load`."""
        kernels = library.load(dtype)
        functions = kernels.rms_norm, kernels.gated, kernels.rotate_store, kernels.latent_store
        for function, arguments in zip(functions, (_NORM, _GATED, _ROTATE, _LATENT), strict=True):
            function.argtypes, function.restype = arguments, None
        return LayerKernels(dtype, *functions)

    def rms_norm(self, x: Tensor, weight: Tensor, offset: float, epsilon: float) -> Tensor:
        """x [..., size] / sqrt(mean(x^2) + epsilon) * (weight + offset) -> its shape, contiguous.

        x of the model's type or float32, and so the result; weight float32. Raises ValueError.
        """
        x = x if x.is_contiguous() else x.contiguous()
        y = torch.empty_like(x)
        size = x.shape[-1]
        if weight.shape != (size,) or weight.dtype != torch.float32 or x.dtype not in (self.dtype, torch.float32):
            raise ValueError(f"a weight {tuple(weight.shape)} of {weight.dtype} for {size} features of {x.dtype}")
        kind = _SUMS if x.dtype == torch.float32 else _REALS
        self._rms_norm(
            x.data_ptr(), size, x.numel() // size, size, weight.data_ptr(), offset, epsilon, kind, y.data_ptr()
        )  # fmt: skip
        return y

    def gated(self, both: Tensor, gate: Gate) -> Tensor:
        """both [tokens, 2 * size] float32, gate then up -> [tokens, size] of the model's type."""
        tokens, size = both.shape[0], both.shape[1] // 2
        y = both.new_empty(tokens, size, dtype=self.dtype)
        start = both.data_ptr()
        clamps = _Clamps(gate.alpha, gate.limit, gate.offset)
        self._gated(start, start + 4 * size, 2 * size, tokens, size, gate.number, clamps, y.data_ptr())
        return y

    def rotate_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, places: Tensor,
        pools: tuple[Tensor, Tensor], form: KVFormat = PLAIN,
    ) -> None:  # fmt: skip
        """Rotates q [tokens, heads, size] and k [tokens, kv_heads, size] in place; writes k and v to `pools`
        [..., kv_heads, width of a row] at `places`, in `form`.

        q, k, v float32, each head's together; cos, sin [tokens, rotated] float32, contiguous. Raises ValueError.
        """
        if cos.shape[-1] > q.shape[-1]:
            raise ValueError(f"{cos.shape[-1]} numbers of {q.shape[-1]} are rotated")
        self._rotate_store(
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), len(q), q.shape[1],
            k.shape[1], q.shape[2], cos.data_ptr(), sin.data_ptr(), cos.shape[-1], places.data_ptr(), form.number,
            pools[0].data_ptr(), pools[1].data_ptr(),
        )  # fmt: skip

    def latent_store(
        self, q: Tensor, kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, places: Tensor,
        pools: tuple[Tensor, Tensor], form: KVFormat = PLAIN, *, by_pairs: bool,
    ) -> None:  # fmt: skip
        """Rotates the ends of q [tokens, heads, own + rotated] and `shared` [tokens, rotated] in place, halves or, by
        pairs, neighbours. Writes to `pools` [..., heads, width of a row] at `places`, in `form`, keys of own + rotated
        numbers, the first of kv [tokens, heads, own + value] and then `shared`, and values with zeros behind them.

        q, kv, shared float32, each head's together; cos, sin [tokens, rotated] float32, contiguous; value is no more
        than own + rotated, and rotated no more than MOST_ROTATED. Raises ValueError.
        """
        tokens, heads, size = q.shape
        own = size - shared.shape[-1]
        if cos.shape[-1] != shared.shape[-1]:
            raise ValueError(f"{shared.shape[-1]} numbers are rotated, by {cos.shape[-1]}")
        self._latent_store(
            q.data_ptr(), q.stride(0), kv.data_ptr(), kv.stride(0), shared.data_ptr(), shared.stride(0), tokens, heads,
            own, size - own, kv.shape[-1] - own, cos.data_ptr(), sin.data_ptr(), by_pairs, places.data_ptr(),
            form.number, pools[0].data_ptr(), pools[1].data_ptr(),
        )  # fmt: skip
