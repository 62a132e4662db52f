"""The compiled kernels as functions of tensors: products by frozen weights, a whole layer."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.native import library
from lora_serve.model.system.process import HUGE_PAGES, advise_huge_pages

_ADDRESS, _SIZE, _FLOAT = library.ADDRESS, library.SIZE, ctypes.c_float
_PRODUCT: list[Any] = [_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE]
_CHUNK = 64 * 2**20  # bytes of huge pages that are taken at once
_MOST = _CHUNK // 4  # of a tensor that shares one
_ALIGNMENT = 64


class HugePages:
    """Gives out memory that is never taken back piece by piece: a chunk is freed with the last tensor in it.

    A tensor of one or two MB by itself seldom holds a whole huge page.
    """

    def __init__(self) -> None:
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose content is anything."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if HUGE_PAGES is None or not 0 < size <= _MOST:
            return alone(shape, dtype)
        chunk = None if self._chunk is None else self._chunk()
        if chunk is None or self._used + size > _CHUNK:
            chunk = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(HUGE_PAGES)
            self._chunk, self._used = weakref.ref(chunk), 0
        found = torch.frombuffer(chunk, dtype=dtype, count=count, offset=self._used).view(tuple(shape))
        self._used += size
        return found


_huge_pages = HugePages()


class PanelKind(IntEnum):
    """How the numbers of a panel lie; see `tile.h`, which has them in this order."""

    FLOATS = 0  # float32
    PAIRS = 1  # bfloat16, for products of float32: half the bytes of a weight that has no other numbers
    DEPTH_PAIRS = 2  # bfloat16, for products of bfloat16


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """W [out, in], and the function that multiplies by it."""

    panels: Tensor  # [num_panels, words of a panel] int32
    kind: int  # a PanelKind
    in_features: int
    out_features: int
    panel_outputs: int
    _function: Any

    @staticmethod
    def of(weight: Tensor) -> PackedLinear:
        """Lays out weight [out, in], float32 or bfloat16, which is also its inputs' type. Raises OSError.

        A float32 weight takes a bfloat16 one's bytes if every number of it is one.
        """
        kernels = _kernels(weight.dtype)
        kinds = (PanelKind.DEPTH_PAIRS,) if weight.dtype == torch.bfloat16 else (PanelKind.PAIRS, PanelKind.FLOATS)
        for kind in kinds:
            if (panels := _packed(kernels, weight.contiguous(), kind)) is not None:
                return PackedLinear(
                    panels, kind, weight.shape[1], len(weight), kernels.panel_outputs(), kernels.packed_linear
                )
        raise AssertionError("the last kind holds every bit")

    @property
    def dtype(self) -> torch.dtype:
        """The type of its inputs."""
        return torch.bfloat16 if self.kind is PanelKind.DEPTH_PAIRS else torch.float32

    @property
    def likeness(self) -> Any:
        """Equal for weights that may lie in one piece."""
        return self.kind, self.in_features

    @property
    def places(self) -> tuple[Any, ...]:
        """The arguments of the function beside the sizes."""
        return ()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] W^T + bias [out] -> [..., out], float32 sums; each row's bits do not depend on other rows.

        bias is float32.
        """
        assert x.dtype == self.dtype, f"an input of {x.dtype}"
        assert bias is None or bias.dtype == torch.float32, f"a bias of {bias.dtype}"
        flat = x.reshape(-1, self.in_features)
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features), dtype=torch.float32)
        self._function(
            flat.data_ptr(), flat.stride(0), flat.shape[0], self.in_features, self.panels.data_ptr(), self.kind,
            None if bias is None else bias.data_ptr(), y.data_ptr(), self.out_features, *self.places,
        )  # fmt: skip
        return y

    def dense(self) -> Tensor:
        """W as a plain tensor [out, in] of the inputs' type: a copy."""
        count, outputs = len(self.panels), self.panel_outputs
        if self.kind is PanelKind.FLOATS:
            panels = self.panels.view(torch.float32).view(count, -1, outputs)  # [panels, in, outputs]
        elif self.kind is PanelKind.PAIRS:
            words = self.panels.view(count, -1, outputs // 2)
            panels = torch.stack([words << 16, words & -65536], dim=2).view(torch.float32).flatten(2)
        else:
            pairs = self.panels.view(torch.bfloat16).view(count, -1, outputs, 2)
            panels = pairs.transpose(2, 3).flatten(1, 2)
        whole: Tensor = panels.transpose(1, 2).flatten(0, 1)
        return whole[: self.out_features, : self.in_features].contiguous()


def join(parts: Sequence[PackedLinear]) -> tuple[PackedLinear, list[tuple[slice, PackedLinear]]] | None:
    """Weights of one input in one piece: all of them, and each as its columns of the product and a view of its own.

    None where they are of different kinds, or one that is not the last does not fill its panels.
    """
    if len({part.likeness for part in parts}) != 1:
        return None
    if any(part.out_features % part.panel_outputs for part in parts[:-1]):
        return None
    panels = _huge_pages.empty((sum(len(part.panels) for part in parts), parts[0].panels.shape[1]), torch.int32)
    torch.cat([part.panels for part in parts], out=panels)
    views, panel, column = [], 0, 0
    for part in parts:
        own = panels[panel : panel + len(part.panels)]
        views.append((slice(column, column + part.out_features), replace(part, panels=own)))
        panel, column = panel + len(part.panels), column + part.out_features
    return replace(parts[0], panels=panels, out_features=column), views


def why_not(weight: Tensor) -> str | None:
    """The reason why a weight cannot be packed; None: it can."""
    if weight.numel() == 0:
        return "is empty"
    return library.why_not(weight.device, weight.dtype)


def alone(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of its own memory, in huge pages as far as it fills some."""
    found = torch.empty(tuple(shape), dtype=dtype)
    advise_huge_pages(found)
    return found


def _kernels(dtype: torch.dtype) -> Any:
    kernels = library.load(dtype)
    kernels.packed_linear.argtypes, kernels.packed_linear.restype = _PRODUCT, None
    kernels.pack.argtypes, kernels.pack.restype = [_ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE], _SIZE
    kernels.words_of_panel.argtypes, kernels.words_of_panel.restype = [_SIZE, _SIZE], _SIZE
    kernels.panel_outputs.restype = _SIZE
    return kernels


def _packed(kernels: Any, weight: Tensor, kind: PanelKind) -> Tensor | None:
    """weight [out, in] -> panels, zeros after the last output and input; None: they cannot hold every bit."""
    num_panels = -(-len(weight) // kernels.panel_outputs())
    panels = alone((num_panels, kernels.words_of_panel(kind, weight.shape[1])), torch.int32)
    is_exact = kernels.pack(weight.data_ptr(), *weight.shape, panels.data_ptr(), kind)
    return panels if is_exact else None


class Weight(ctypes.Structure):
    """A frozen linear layer, or several of one input."""

    _fields_ = (
        *(("panels", _ADDRESS), ("kind", _SIZE), ("in_", _SIZE), ("out", _SIZE), ("bias", _ADDRESS)),
        *(("group", _SIZE), ("depth", _SIZE), ("order", _ADDRESS)),
    )

    @staticmethod
    def of(packed: PackedLinear, bias: Tensor | None) -> Weight:
        """`packed` and `bias`, float32, must outlive it."""
        address = None if bias is None else bias.data_ptr()
        sizes = packed.kind, packed.in_features, packed.out_features
        return Weight(packed.panels.data_ptr(), *sizes, address, *packed.places)


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
        *((name, _SIZE) for name in ("heads", "kv_heads", "size", "block_size", "window", "chunk", "activation")),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
    )


class Latent(ctypes.Structure):
    """The model's part of latent attention; query.panels None: queries come of no latent vector."""

    _fields_ = (
        *((name, Weight) for name in ("joined", "query", "keys", "output")),
        ("adapters", Adapters * 5),  # of what queries come of, of what keys come of, query, keys, output
        *((name, Norm) for name in ("query_norm", "latent_norm")),
        *((name, _SIZE) for name in ("heads", "own", "rotated", "value", "block_size", "window", "chunk", "by_pairs")),
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
        ("stored", _SIZE),  # see `KVFormat.number`
        ("passes", ctypes.POINTER(Pass)),
        *((name, _ADDRESS) for name in ("places", "cos", "sin", "tables", "attention_pieces")),
    )


def load_decoder_layer(dtype: torch.dtype) -> tuple[Any, Any]:
    """decoder_layer(layer, step, h, scratch, key_pool, value_pool) and room_bytes(layer), for h of `dtype`.

    Raises OSError.
    """
    kernels = library.load(dtype)
    kernels.decoder_layer.argtypes = [ctypes.POINTER(Layer), ctypes.POINTER(Step), *[_ADDRESS] * 4]
    kernels.decoder_layer.restype = None
    kernels.room_bytes.argtypes, kernels.room_bytes.restype = [ctypes.POINTER(Layer)], _SIZE
    return kernels.decoder_layer, kernels.room_bytes


def load_latent_attention(dtype: torch.dtype) -> tuple[Any, Any]:
    """latent_attention(layer, step, x, scratch, key_pool, value_pool, y) and latent_room(layer), for x of `dtype`.

    Raises OSError.
    """
    kernels = library.load(dtype)
    kernels.latent_attention.argtypes = [ctypes.POINTER(Latent), ctypes.POINTER(Step), *[_ADDRESS] * 5]
    kernels.latent_attention.restype = None
    kernels.latent_room.argtypes, kernels.latent_room.restype = [ctypes.POINTER(Latent)], _SIZE
    return kernels.latent_attention, kernels.latent_room


def array_of(kind: type[Any], items: Sequence[Any]) -> Any:
    return (kind * len(items))(*items)
