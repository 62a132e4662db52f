"""Asks the system to back a large tensor with huge pages: fewer misses of the address cache while it is read."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
_HUGE = 2 * 2**20


def advise_huge_pages(tensor: Tensor) -> None:
    """Best before its pages are first touched. Changes nothing but speed; a system that refuses is left alone."""
    if _ADVICE is None or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    size = (tensor.data_ptr() + tensor.untyped_storage().nbytes() - start) // _HUGE * _HUGE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _ADVICE)
