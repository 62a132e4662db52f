"""An adapter's files, read once into memory of our own: what was hashed is what is parsed, however the files change.

No torch.
"""

from __future__ import annotations

import hashlib
import mmap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.checkpoint.digest import (
    ADDED_TOKENS_NAME,
    CONFIG_NAME,
    WEIGHTS_NAME,
    check_found,
    content_names,
)
from lora_serve.adapters.regular_file import filled, open_regular, size_of


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The bytes of one adapter version and the digest that they have."""

    digest: str
    config: memoryview
    weights: memoryview  # writable: tensors may be views of it
    added_tokens: memoryview | None


def read_content(folder: Path, digest: str) -> AdapterContent:
    """What `digest` names. Raises AdapterUnavailableError if the folder holds anything else, OSError."""
    inner, files = b"", {}
    for name in content_names(folder):
        files[name], own = _read(folder / name)
        inner += own
    check_found("sha256:" + hashlib.sha256(inner).hexdigest(), digest)
    return AdapterContent(digest, files[CONFIG_NAME], files[WEIGHTS_NAME], files.get(ADDED_TOKENS_NAME))


def _read(path: Path) -> tuple[memoryview, bytes]:
    """The file and its 32 bytes of SHA-256. Raises OSError, also if it changes its length meanwhile."""
    with open_regular(path) as file:
        memory = _memory(size_of(file))
        content = hashlib.sha256()
        for piece in filled(file, memory):
            content.update(piece)
        return memory, content.digest()


def _memory(size: int) -> memoryview:
    """Zeroed by the system, not under the GIL; in huge pages, where there are some: a third of the time to fill it."""
    if not size:
        return memoryview(bytearray())
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
