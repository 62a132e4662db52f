"""`layers.c` and `decoder_layer.c`: the kernels between a decoder layer's products, and a whole layer in one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.native import library
from lora_serve.model.native.packed_linear import PackedLinear

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


class Weight(ctypes.Structure):
    """A frozen linear layer, or several of one input."""

    _fields_ = (("panels", _ADDRESS), ("kind", _SIZE), ("in_", _SIZE), ("out", _SIZE), ("bias", _ADDRESS))

    @staticmethod
    def of(packed: PackedLinear, bias: Tensor | None) -> Weight:
        """`packed` and `bias`, float32, must outlive it."""
        address = None if bias is None else bias.data_ptr()
        return Weight(packed.panels.data_ptr(), packed.kind, packed.in_features, packed.out_features, address)


class Adapters(ctypes.Structure):
    """One linear layer's row of every slot table, in the order of `lora_add`; and its columns of a joined product."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("a", "b", "gain", "shift", "rank", "scale", "is_bfloat16")),
        ("column", _SIZE),
        ("out", _SIZE),
    )


class Norm(ctypes.Structure):
    """A root mean square norm; weight None: there is none."""

    _fields_ = (("weight", _ADDRESS), ("offset", _FLOAT), ("epsilon", _FLOAT))


class Layer(ctypes.Structure):
    """The model's part of a decoder layer: weights, norms and shapes."""

    _fields_ = (
        *((name, Weight) for name in ("joined_attention", "output", "joined_mlp", "down")),
        ("adapters", Adapters * 7),  # q, k, v, output, gate, up, down
        *((name, Norm) for name in ("before_attention", "before_mlp", "query", "key")),
        *((name, _SIZE) for name in ("heads", "kv_heads", "size", "block_size", "window", "activation")),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
    )


class Pass(ctypes.Structure):
    """One pass of adapters over the tokens, see `LoraTokens`."""

    _fields_ = (("pieces", _ADDRESS), ("num_pieces", _SIZE), ("weights", _ADDRESS))


class Step(ctypes.Structure):
    """The part of a step that all layers read."""

    _fields_ = (
        *((name, _SIZE) for name in ("tokens", "num_passes", "rotated", "num_attention_pieces", "most_tokens")),
        ("passes", ctypes.POINTER(Pass)),
        *((name, _ADDRESS) for name in ("places", "cos", "sin", "tables", "attention_pieces")),
    )


def load(dtype: torch.dtype) -> tuple[Any, Any]:
    """decoder_layer(layer, step, h, room, key_pool, value_pool) and room_bytes(layer), for h of `dtype`.

    Raises OSError.
    """
    kernels = library.load(dtype)
    kernels.decoder_layer.argtypes = [ctypes.POINTER(Layer), ctypes.POINTER(Step), *[_ADDRESS] * 4]
    kernels.decoder_layer.restype = None
    kernels.room_bytes.argtypes, kernels.room_bytes.restype = [ctypes.POINTER(Layer)], _SIZE
    return kernels.decoder_layer, kernels.room_bytes


def array_of(kind: type[Any], items: Sequence[Any]) -> Any:
    return (kind * len(items))(*items)
