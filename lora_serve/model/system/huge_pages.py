"""Tensors that live as long as the model, side by side in pieces of memory large enough for huge pages."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

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
