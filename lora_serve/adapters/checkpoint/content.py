"""An adapter's files, read once into memory, and its identity: the SHA-256 of their content."""

from __future__ import annotations

import errno
import hashlib
import mmap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.checkpoint.safetensors_header import read_header
from lora_serve.adapters.regular_file import (
    TooLargeFileError,
    UnsoundFileError,
    filled,
    open_regular,
    size_of,
    views_of,
)
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
ADDED_TOKENS_NAME = "lora_serve_added_tokens.json"  # only beside adapters that add tokens
CHAT_TEMPLATE_NAME = "lora_serve_chat_template.json"  # only beside adapters whose chat template is not the base's
END_TOKENS_NAME = "lora_serve_end_tokens.json"  # only beside adapters that end where the base does not
TOKENIZER_NAME = "tokenizer.json"  # of a trainer's folder, as are those below; not kept
TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
OPTIONAL_NAMES = (ADDED_TOKENS_NAME, CHAT_TEMPLATE_NAME, END_TOKENS_NAME)  # of an adapter's content
CONTENT_NAMES = frozenset((CONFIG_NAME, WEIGHTS_NAME, *OPTIONAL_NAMES))
MAX_CONFIG_BYTES = 2**20
MAX_TOKENIZER_BYTES = 48 * 2**20
MAX_ADDED_TOKENS_BYTES = 4 * 2**20
MAX_TOKENIZER_CONFIG_BYTES = 4 * 2**20
MAX_KEPT_TEMPLATE_BYTES = 2**20
MAX_SIDE_BYTES = {
    TOKENIZER_NAME: MAX_TOKENIZER_BYTES,
    TEMPLATE_NAME: 2**20,  # far more than may be taken, so that one that is too large is refused in words
    TOKENIZER_CONFIG_NAME: MAX_TOKENIZER_CONFIG_BYTES,
    GENERATION_CONFIG_NAME: MAX_CONFIG_BYTES,
}
SIDE_NAMES = tuple(MAX_SIDE_BYTES)  # looked at where they are there
_MARKED = (CHAT_TEMPLATE_NAME, END_TOKENS_NAME)


def file_sha256(path: Path) -> bytes:
    """32 bytes; the file is streamed. Raises OSError."""
    content = hashlib.sha256()
    with open_regular(path) as file:
        for piece in views_of(file):
            content.update(piece)
    return content.digest()


def adapter_digest(folder: Path) -> str:
    """`"sha256:" + hex(sha256(sha256(config file) || sha256(weights file)))`, each inner hash as its 32 raw bytes.

    A third is the file of added tokens, where there is one; those of its own chat template and of its end tokens follow
    behind marks that tell them apart. A README beside them changes nothing. Raises OSError.
    """
    inner = b"".join(inner_hash(name, file_sha256(folder / name)) for name in content_names(folder))
    return "sha256:" + hashlib.sha256(inner).hexdigest()


def inner_hash(name: str, sha256: bytes) -> bytes:
    """The part of the digest that a file of the content gives."""
    return hashlib.sha256(name.encode()).digest() + sha256 if name in _MARKED else sha256


def content_names(folder: Path) -> tuple[str, ...]:
    """The files that are an adapter's content, and its digest, in that order."""
    return CONFIG_NAME, WEIGHTS_NAME, *(name for name in OPTIONAL_NAMES if (folder / name).is_file())


def check_digest(found: str, digest: str) -> None:
    """Raises AdapterUnavailableError unless the two digests are equal."""
    if found != digest:
        raise AdapterUnavailableError(
            f"The adapter's stored files are corrupt and were not used (their digest is {found}, not {digest}); "
            "register the adapter again.",
            retry_after=30,
        )


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
    check_digest("sha256:" + hashlib.sha256(inner).hexdigest(), digest)
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


DUMMY_RANK, DUMMY_DIGEST = 8, "warm-up"  # the digest is no SHA-256, so no registered adapter can have it


def dummy_adapter_ref(spec: ModelSpec) -> AdapterRef:
    """The reference of the dummy adapter."""
    num_bytes = sum(4 * DUMMY_RANK * (shape.in_features + shape.out_features) for shape in spec.linears.values())
    return AdapterRef("", "warm-up", 1, DUMMY_DIGEST, DUMMY_RANK, num_bytes)
