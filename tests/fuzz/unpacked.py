"""An archive unpacked by the product, and what it gave."""

from __future__ import annotations

from lora_serve.adapters.archives.unpacking import unpack
from lora_serve.core.errors import InvalidAdapterError, PayloadTooLargeError
from tests.fuzz.files import empty_folder, file_of

ERRORS = (InvalidAdapterError, PayloadTooLargeError)
MAX_BYTES = 2**20
FILES = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": bytes(range(40))}
SIDES = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}", "README.md": b"# an adapter"}


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files by name. Nothing lies beside them. Raises ERRORS."""
    with file_of(data) as path, empty_folder() as folder:
        before = set(folder.parent.iterdir())
        try:
            unpack(path, folder, MAX_BYTES)
        finally:
            assert set(folder.parent.iterdir()) == before, "something was written outside"
            assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert not [file for file in folder.iterdir() if file.is_symlink() or not file.is_file()]
        return files
