"""An adapter's files, read once into memory: the bytes that were hashed are parsed, however the files change.

No torch.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.checkpoint.digest import (
    ADDED_TOKENS_NAME,
    CHAT_TEMPLATE_NAME,
    CONFIG_NAME,
    END_TOKENS_NAME,
    MAX_ADDED_TOKENS_BYTES,
    MAX_CONFIG_BYTES,
    MAX_KEPT_TEMPLATE_BYTES,
    WEIGHTS_NAME,
    check_found,
    content_names,
    inner_hash,
)
from lora_serve.adapters.checkpoint.safetensors_header import read_header
from lora_serve.adapters.regular_file import TooLargeFileError, UnsoundFileError, filled, open_regular, size_of
from lora_serve.core.errors import InvalidAdapterError

_MAX_BYTES = {
    CONFIG_NAME: MAX_CONFIG_BYTES,
    ADDED_TOKENS_NAME: MAX_ADDED_TOKENS_BYTES,
    CHAT_TEMPLATE_NAME: MAX_KEPT_TEMPLATE_BYTES,
    END_TOKENS_NAME: MAX_CONFIG_BYTES,
}
_HASHED_AT_ONCE = 16 * 2**20  # bytes of weights: hashed sooner than it is found out whether their header fits them


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The bytes of one adapter version and the digest that they have."""

    digest: str
    config: memoryview
    weights: memoryview  # writable: tensors may be views of it
    added_tokens: memoryview | None


def read_content(folder: Path, digest: str) -> AdapterContent:
    """The content that `digest` names. Raises AdapterUnavailableError if the folder holds anything else, OSError."""
    inner, files = b"", {}
    for name in content_names(folder):
        files[name], own = _read(folder / name)
        inner += inner_hash(name, own)
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


def check_sizes(folder: Path) -> None:
    """Refuses a stored content with weights longer than their header says, or another file beyond its bound.

    A file of holes takes no room on a disk and may be of any length; to hash it to its end could take days. Raises
    OSError, UnsoundFileError for what no content can be.
    """
    for name in content_names(folder):
        with open_regular(folder / name) as file:
            size = size_of(file)
        if name == WEIGHTS_NAME:
            if size > _HASHED_AT_ONCE:
                _check_header(folder / name)
        elif size > _MAX_BYTES[name]:
            raise TooLargeFileError(name, _MAX_BYTES[name])


def _check_header(weights: Path) -> None:
    try:
        read_header(weights)
    except InvalidAdapterError as error:
        raise UnsoundFileError(errno.EINVAL, "; ".join(error.reasons)) from None
