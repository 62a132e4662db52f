"""`decoder_layer.c`: its structures, and the function that runs one layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.native import library
from lora_serve.model.native.packed_linear import PackedLinear

_ADDRESS, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


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
