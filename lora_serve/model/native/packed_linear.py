"""Frozen weights in panels for `packed_linear.c`: float32 products from bfloat16 bytes where that loses nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_serve.model.native import library
from lora_serve.model.system.process import advise_huge_pages

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: list[Any] = [_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """W [out, in] of float32 products, and the function that multiplies by it."""

    panels: Tensor  # [num_panels, in, lanes] int32 of bfloat16 pairs, or [num_panels, in, 2 * lanes] float32
    out_features: int
    _function: Any

    @staticmethod
    def of(weight: Tensor) -> PackedLinear:
        """Lays out weight [out, in] float32: in bfloat16 if every number of it is one. Raises OSError."""
        kernels = _kernels()
        panels = _packed(kernels, weight.contiguous(), torch.int32)
        if panels is None:
            panels = _packed(kernels, weight.contiguous(), torch.float32)
        assert panels is not None, "float32 has room for every bit"
        return PackedLinear(panels, len(weight), kernels.packed_linear)

    @property
    def is_bfloat16(self) -> bool:
        return self.panels.dtype == torch.int32

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] W^T + bias [out] -> [..., out], all float32; each row's bits do not depend on other rows."""
        assert x.dtype == torch.float32, f"an input of {x.dtype}"
        flat = x.reshape(-1, x.shape[-1])
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        self._function(
            flat.data_ptr(), flat.stride(0), flat.shape[0], flat.shape[1], self.panels.data_ptr(), self.is_bfloat16,
            None if bias is None else bias.data_ptr(), y.data_ptr(), self.out_features,
        )  # fmt: skip
        return y

    def dense(self) -> Tensor:
        """W as a plain tensor [out, in] float32: a copy."""
        panels = self.panels
        if self.is_bfloat16:
            halves = torch.stack([panels << 16, panels & -65536], dim=2)  # [panels, in, 2, lanes]
            panels = halves.view(torch.float32).flatten(2)
        return panels.transpose(1, 2).flatten(0, 1)[: self.out_features].contiguous()


def join(parts: Sequence[PackedLinear]) -> tuple[PackedLinear, list[tuple[slice, PackedLinear]]] | None:
    """Weights of one input in one piece: all of them, and each as its columns of the product and a view of its own.

    None where they are of different kinds, or one that is not the last does not fill its panels.
    """
    if len({(part.panels.dtype, *part.panels.shape[1:]) for part in parts}) != 1:
        return None
    width = parts[0].panels.shape[2] * (2 if parts[0].is_bfloat16 else 1)
    if any(part.out_features % width for part in parts[:-1]):
        return None
    panels = _in_huge_pages(torch.cat([part.panels for part in parts]))
    views, panel, column = [], 0, 0
    for part in parts:
        own = panels[panel : panel + len(part.panels)]
        views.append((slice(column, column + part.out_features), replace(part, panels=own)))
        panel, column = panel + len(part.panels), column + part.out_features
    return replace(parts[0], panels=panels, out_features=column), views


def why_not(weight: Tensor) -> str | None:
    """The reason why a weight cannot be packed; None: it can."""
    if weight.dtype != torch.float32:
        return f"multiplies float32, not {weight.dtype}"
    if weight.numel() == 0:
        return "is empty"
    return library.why_not(weight.device, weight.dtype)


def _in_huge_pages(panels: Tensor) -> Tensor:
    return _empty_in_huge_pages(panels.shape, panels.dtype).copy_(panels)


def _empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    panels = torch.empty(tuple(shape), dtype=dtype)
    advise_huge_pages(panels)
    return panels


def _kernels() -> Any:
    kernels = library.load(torch.float32)
    kernels.packed_linear.argtypes, kernels.packed_linear.restype = _ARGUMENTS, None
    kernels.pack.argtypes, kernels.pack.restype = [_ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE], _SIZE
    kernels.lanes.restype = _SIZE
    return kernels


def _packed(kernels: Any, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """weight [out, in] -> [num_panels, in, lanes] int32: output c low, output c + lanes high; None: it is no bfloat16.

    dtype float32 -> [num_panels, in, 2 * lanes]. Zeros after the last output.
    """
    lanes, is_bfloat16 = kernels.lanes(), dtype == torch.int32
    shape = (-(-len(weight) // (2 * lanes)), weight.shape[1], lanes if is_bfloat16 else 2 * lanes)
    panels = _empty_in_huge_pages(shape, dtype)
    is_exact = kernels.pack(weight.data_ptr(), *weight.shape, panels.data_ptr(), is_bfloat16)
    return panels if is_exact else None
