"""`layers.c`: the kernels between the products of a decoder layer, on the CPU.

Inputs of products and the KV cache are of the model's type, outputs of products float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.native import library

_ADDRESS, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_NORM: list[Any] = [_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _FLOAT, _FLOAT, _SIZE, _ADDRESS]
_GATED: list[Any] = [_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS]
_ROTATE: list[Any] = [
    *[_ADDRESS, _SIZE] * 3, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS,
]  # fmt: skip
ACTIVATIONS = ("silu", "gelu_tanh")  # in the order of the enum
_SUMS, _REALS = range(2)  # likewise


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The functions of the compiled kernels for models of one type."""

    dtype: torch.dtype
    _rms_norm: Any
    _gated: Any
    _rotate_store: Any

    @staticmethod
    def load(dtype: torch.dtype) -> LayerKernels:
        """Loads the kernels. Raises OSError, see `library.load`."""
        kernels = library.load(dtype)
        functions = kernels.rms_norm, kernels.gated, kernels.rotate_store
        for function, arguments in zip(functions, (_NORM, _GATED, _ROTATE), strict=True):
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

    def gated(self, both: Tensor, activation: str) -> Tensor:
        """both [tokens, 2 * size] float32, gate then up -> act(gate) * up, [tokens, size] of the model's type."""
        tokens, size = both.shape[0], both.shape[1] // 2
        y = both.new_empty(tokens, size, dtype=self.dtype)
        start = both.data_ptr()
        self._gated(start, start + 4 * size, 2 * size, tokens, size, ACTIVATIONS.index(activation), y.data_ptr())
        return y

    def rotate_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, places: Tensor, pools: tuple[Tensor, Tensor]
    ) -> None:
        """Rotates q [tokens, heads, size] and k [tokens, kv_heads, size] in place; writes k and v to `pools`
        [..., kv_heads, size] at `places`.

        q, k, v float32, each head's together; cos, sin [tokens, rotated] float32, contiguous; pools of the model's
        type.
        """
        self._rotate_store(
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), len(q), q.shape[1],
            k.shape[1], q.shape[2], cos.data_ptr(), sin.data_ptr(), cos.shape[-1], places.data_ptr(),
            pools[0].data_ptr(), pools[1].data_ptr(),
        )  # fmt: skip
