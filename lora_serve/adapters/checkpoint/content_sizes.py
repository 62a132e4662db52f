"""The sizes that a stored content's files can have: looked at before a byte is hashed or copied.

A file of holes takes no room on a disk and may be of any length; to read it to its end could take days.
"""

from __future__ import annotations

import errno
from pathlib import Path

from lora_serve.adapters.checkpoint.digest import ADDED_TOKENS_NAME, CONFIG_NAME, WEIGHTS_NAME, content_names
from lora_serve.adapters.checkpoint.peft_config import MAX_FILE_BYTES
from lora_serve.adapters.checkpoint.safetensors_header import read_header
from lora_serve.adapters.checkpoint.tokenizer_file import MAX_LIST_BYTES
from lora_serve.adapters.regular_file import TooLargeFileError, open_regular, size_of
from lora_serve.core.errors import InvalidAdapterError

_MAX_BYTES = {CONFIG_NAME: MAX_FILE_BYTES, ADDED_TOKENS_NAME: MAX_LIST_BYTES}
_HASHED_AT_ONCE = 16 * 2**20  # bytes of weights: hashed sooner than it is found out whether their header fits them


def check_sizes(folder: Path) -> None:
    """Large weights are as long as their own header says, the other files within their bounds. Raises OSError."""
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
        raise OSError(errno.EINVAL, "; ".join(error.reasons)) from None
