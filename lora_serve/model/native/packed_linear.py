"""Frozen weights in panels for `packed_linear.c`: the kinds of panels, and products by them."""

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
from lora_serve.model.system.process import advise_huge_pages

_CHUNK = 64 * 2**20  # bytes
_MOST = _CHUNK // 4  # of a tensor that shares one
_ALIGNMENT = 64
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


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
        if _ADVICE is None or not 0 < size <= _MOST:
            alone = torch.empty(tuple(shape), dtype=dtype)
            advise_huge_pages(alone)
            return alone
        chunk = None if self._chunk is None else self._chunk()
        if chunk is None or self._used + size > _CHUNK:
            chunk = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(_ADVICE)
            self._chunk, self._used = weakref.ref(chunk), 0
        found = torch.frombuffer(chunk, dtype=dtype, count=count, offset=self._used).view(tuple(shape))
        self._used += size
        return found


_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
_huge_pages = HugePages()
_ARGUMENTS: list[Any] = [_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE]


class Kind(IntEnum):
    """How the numbers of a panel lie; see `tile.h`, which has them in this order."""

    FLOATS = 0  # float32
    PAIRS = 1  # bfloat16, for products of float32: half the bytes of a weight that has no other numbers
    DEPTH_PAIRS = 2  # bfloat16, for products of bfloat16


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """W [out, in], and the function that multiplies by it."""

    panels: Tensor  # [num_panels, words of a panel] int32
    kind: Kind
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
        kinds = (Kind.DEPTH_PAIRS,) if weight.dtype == torch.bfloat16 else (Kind.PAIRS, Kind.FLOATS)
        for kind in kinds:
            if (panels := _packed(kernels, weight.contiguous(), kind)) is not None:
                return PackedLinear(
                    panels, kind, weight.shape[1], len(weight), kernels.panel_outputs(), kernels.packed_linear
                )
        raise AssertionError("the last kind has room for every bit")

    @property
    def dtype(self) -> torch.dtype:
        """The type of its inputs."""
        return torch.bfloat16 if self.kind is Kind.DEPTH_PAIRS else torch.float32

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
            None if bias is None else bias.data_ptr(), y.data_ptr(), self.out_features,
        )  # fmt: skip
        return y

    def dense(self) -> Tensor:
        """W as a plain tensor [out, in] of the inputs' type: a copy."""
        count, outputs = len(self.panels), self.panel_outputs
        if self.kind is Kind.FLOATS:
            panels = self.panels.view(torch.float32).view(count, -1, outputs)  # [panels, in, outputs]
        elif self.kind is Kind.PAIRS:
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
    if len({(part.kind, part.in_features) for part in parts}) != 1:
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


def _empty_in_huge_pages(shape: Sequence[int]) -> Tensor:
    panels = torch.empty(tuple(shape), dtype=torch.int32)
    advise_huge_pages(panels)
    return panels


def _kernels(dtype: torch.dtype) -> Any:
    kernels = library.load(dtype)
    kernels.packed_linear.argtypes, kernels.packed_linear.restype = _ARGUMENTS, None
    kernels.pack.argtypes, kernels.pack.restype = [_ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE], _SIZE
    kernels.words_of_panel.argtypes, kernels.words_of_panel.restype = [_SIZE, _SIZE], _SIZE
    kernels.panel_outputs.restype = _SIZE
    return kernels


def _packed(kernels: Any, weight: Tensor, kind: Kind) -> Tensor | None:
    """weight [out, in] -> panels, zeros after the last output and input; None: they have no room for every bit."""
    num_panels = -(-len(weight) // kernels.panel_outputs())
    panels = _empty_in_huge_pages((num_panels, kernels.words_of_panel(kind, weight.shape[1])))
    is_exact = kernels.pack(weight.data_ptr(), *weight.shape, panels.data_ptr(), kind)
    return panels if is_exact else None
