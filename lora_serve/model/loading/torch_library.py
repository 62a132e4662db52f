"""Torch's own library, most of the bytes of torch's import, loaded beside other imports. This module imports no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from contextlib import suppress
from pathlib import Path

_LIBRARY = "lib/libtorch_cpu.so"


def load_ahead() -> None:
    """Begins to load torch's library on a thread, without the GIL that torch's import would hold meanwhile."""
    spec = importlib.util.find_spec("torch")
    if "torch" in sys.modules or spec is None or spec.origin is None:
        return
    library = Path(spec.origin).parent / _LIBRARY

    def load() -> None:
        with suppress(OSError):  # another platform's name; torch's import finds its libraries by itself
            ctypes.CDLL(str(library))

    threading.Thread(target=load, name="torch library", daemon=True).start()
