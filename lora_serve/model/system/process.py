"""The process that computes: its OpenMP team, its allocator and huge pages.

GNU's OpenMP waits at the end of a parallel loop by spinning only as long as all of its threads in the process fit the
processor. One more team, even an idle one, and each wait is a sleep: on two cores a decode step took 1.4 times as long.
A team belongs to the thread that ran a parallel loop, and ends with it. So only the engine's thread has a team.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST_MMAP = 32 * 2**20  # bytes; glibc takes no more
_KEPT = 512 * 2**20


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for this process, from now on. Otherwise it returns large buffers and takes them
    anew, page by page: a fifth of a prefill step. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MOST_MMAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def return_freed_memory() -> None:
    """Returns freed memory to the system: glibc keeps pieces of hundreds of MB between others in use."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
_HUGE = 2 * 2**20


def advise_huge_pages(tensor: Tensor) -> None:
    """Asks the system to back a large tensor with huge pages, best before its pages are first touched. Only speed
    changes.
    """
    if _ADVICE is None or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    size = (tensor.data_ptr() + tensor.untyped_storage().nbytes() - start) // _HUGE * _HUGE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _ADVICE)


def use_one_core() -> None:
    """Makes the calling thread compute on one core from now on, so that it has no team."""
    torch.get_num_threads()  # torch sets a thread's number once, at its first use
    runtime = openmp()
    if runtime is not None:
        runtime.omp_set_num_threads(1)


@functools.cache
def openmp() -> Any:
    """torch's own OpenMP; None where it is of another kind."""
    path = openmp_path()
    return None if path is None else ctypes.CDLL(str(path))


def openmp_path() -> Path | None:
    """The file of torch's own OpenMP."""
    return next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))), None)
