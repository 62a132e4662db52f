"""An adapter version's identity: the SHA-256 of its content."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


def file_sha256(path: Path) -> bytes:
    """32 bytes; the file is streamed. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def adapter_digest(folder: Path) -> str:
    """`"sha256:" + hex(sha256(sha256(config file) || sha256(weights file)))`, each inner hash as its 32 raw bytes.

    Only the two files count: a README beside them changes nothing. Raises OSError.
    """
    inner = file_sha256(folder / CONFIG_NAME) + file_sha256(folder / WEIGHTS_NAME)
    return "sha256:" + hashlib.sha256(inner).hexdigest()
