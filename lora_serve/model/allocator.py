"""Keeps what the CPU's allocator frees: a step's buffers are asked for again in the next one."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST_MMAP = 32 * 2**20  # bytes; glibc takes no more
_KEPT = 512 * 2**20


def keep_freed_memory() -> None:
    """For this process, from now on. Without it glibc hands large buffers back and takes them, page by page, anew:
    a fifth of a prefill step. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MOST_MMAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)
