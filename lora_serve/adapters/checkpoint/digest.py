"""An adapter version's identity, the SHA-256 of its content, and the files that are its content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lora_serve.adapters.regular_file import open_regular, views_of
from lora_serve.core.errors import AdapterUnavailableError

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
# Looked at where they are there.
SIDE_NAMES = (TOKENIZER_NAME, TEMPLATE_NAME, TOKENIZER_CONFIG_NAME, GENERATION_CONFIG_NAME)
MAX_CONFIG_BYTES = 2**20
MAX_TOKENIZER_BYTES = 48 * 2**20
MAX_ADDED_TOKENS_BYTES = 4 * 2**20
MAX_TOKENIZER_CONFIG_BYTES = 4 * 2**20
MAX_KEPT_TEMPLATE_BYTES = 2**20
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


def check_digest(folder: Path, digest: str) -> None:
    """Refuses a folder whose content has another digest. Raises AdapterUnavailableError, OSError."""
    check_found(adapter_digest(folder), digest)


def check_found(found: str, digest: str) -> None:
    """Raises AdapterUnavailableError unless the two digests are equal."""
    if found != digest:
        raise AdapterUnavailableError(
            f"The adapter's stored files are corrupt and were not used (their digest is {found}, not {digest}); "
            "register the adapter again.",
            retry_after=30,
        )
