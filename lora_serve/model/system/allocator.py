"""What the C library's allocator does with freed memory: kept while serving, given back after a start."""

from __future__ import annotations

import contextlib
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


def return_freed_memory() -> None:
    """What this process freed goes back to the system: glibc keeps pieces of hundreds of MB between others in use."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
