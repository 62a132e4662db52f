"""Bytes that a start needs soon, read beside its imports, which keep one core busy. This module imports no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LIBRARY = "lib/libtorch_cpu.so"  # most of what torch's import loads


def load_torch_library() -> None:
    """Begins to load torch's library on a thread, without the GIL that torch's import would hold meanwhile."""
    spec = importlib.util.find_spec("torch")
    if "torch" not in sys.modules and spec is not None and spec.origin is not None:
        _begin(_load, Path(spec.origin).parent / _LIBRARY)


def read_weights(model: str) -> None:
    """Begins to bring a model folder's weights into the page cache; a hub's model is left alone."""
    for file in sorted(Path(model).glob("*.safetensors")):
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
