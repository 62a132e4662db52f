"""Memory of the process, and bytes that a start needs soon. Imports no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lora_serve.core.gguf_file import gguf_of

if TYPE_CHECKING:
    from torch import Tensor

_LIBRARY = "lib/libtorch_cpu.so"  # most of what torch's import loads
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST_MMAP = 32 * 2**20  # bytes; glibc takes no more
_KEPT = 512 * 2**20
HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # the advice; Linux only
_HUGE = 2 * 2**20
GROUPS = Path("/sys/fs/cgroup")
_VERSIONS = (  # of cgroups: files of the limit, of what is in use, of what that is
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_RECLAIMABLE = ("active_file", "inactive_file")  # copies of files, which the kernel lets go when memory is short


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
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def advise_huge_pages(tensor: Tensor) -> None:
    """Asks the system to back a large tensor with huge pages, best before its pages are first touched. Only speed
    changes.
    """
    if HUGE_PAGES is None or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    size = (tensor.data_ptr() + tensor.untyped_storage().nbytes() - start) // _HUGE * _HUGE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), HUGE_PAGES)


def free_in_container(groups: Path = GROUPS) -> int | None:
    """Bytes left below the limit of the control group in which this process sees itself; None: there is no limit."""
    for limit, used, stat in _VERSIONS:
        try:
            most = int((groups / limit).read_text())
            taken = int((groups / used).read_text())
            words = [line.split() for line in (groups / stat).read_text().splitlines()]
        except (OSError, ValueError):  # "max" is no limit
            continue
        cached = sum(int(number) for name, number in words if name in _RECLAIMABLE)
        return max(0, most - taken + cached)
    return None


def load_torch_library() -> None:
    """Begins to load torch's library on a thread, without the GIL that torch's import would hold meanwhile."""
    spec = importlib.util.find_spec("torch")
    if "torch" not in sys.modules and spec is not None and spec.origin is not None:
        _begin(_load, Path(spec.origin).parent / _LIBRARY)


def read_weights(model: str) -> None:
    """Begins to bring a model folder's weights into the page cache; a hub's model is left alone."""
    gguf = gguf_of(model)
    for file in sorted(Path(model).glob("*.safetensors")) if gguf is None else [gguf]:
        _begin(_read, file)


def _begin(work: Callable[[Path], None], path: Path) -> None:
    threading.Thread(target=work, args=(path,), name="read ahead", daemon=True).start()


def _load(library: Path) -> None:
    with suppress(OSError):  # another platform's name; torch's import finds its libraries by itself
        ctypes.CDLL(str(library))


def _read(file: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
