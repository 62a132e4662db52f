"""For sources that keep an adapter's files under their names: sizes first, then only the bytes that are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from lora_serve.adapters.checkpoint.digest import MAX_TOKENIZER_BYTES, TOKENIZER_NAME
from lora_serve.adapters.sources.checksum import Checksum, checked
from lora_serve.adapters.sources.intake import NAMES, PICKLE_NAME, Intake
from lora_serve.core.errors import AdapterUnavailableError


class NamedFiles(Protocol):
    """Files that are asked for by allow-listed names only; nothing is ever listed."""

    def size(self, name: str) -> int | None:
        """Bytes; None if there is no such file."""

    def chunks(self, name: str) -> Iterable[bytes]:
        """Its content, in pieces."""

    def checksum(self, name: str) -> Checksum | None:
        """What the source says of its content; None: nothing. Asked after its size."""


def take_files(files: NamedFiles, intake: Intake) -> None:
    """Everything, or, if one of the two files is missing, only the fact of what is there.

    Raises PayloadTooLargeError before a byte moves, AdapterUnavailableError for a file that ends too early,
    InvalidAdapterError for one that is not what its checksum says.
    """
    sizes = {name: size for name in NAMES if (size := files.size(name)) is not None}
    if len(sizes) < len(NAMES):
        _note(files, sizes, intake)
        return
    intake.check_size(sum(sizes.values()))
    for name, size in sizes.items():
        intake.take(name, _whole(files, name, size))
    tokenizer = files.size(TOKENIZER_NAME)
    if tokenizer is not None and tokenizer <= MAX_TOKENIZER_BYTES:
        intake.take_tokenizer(_whole(files, TOKENIZER_NAME, tokenizer))
    elif tokenizer is not None:
        intake.empty(TOKENIZER_NAME)


def _whole(files: NamedFiles, name: str, size: int) -> Iterator[bytes]:
    """Its content, which has the size and the checksum that the source names."""
    num_bytes = 0
    for chunk in checked(files.chunks(name), size, files.checksum(name), name):
        num_bytes += len(chunk)
        if num_bytes > size:
            raise AdapterUnavailableError(f"{name} came longer than it is said to be; try again.")
        yield chunk
    if num_bytes != size:
        raise AdapterUnavailableError(f"{name} came cut short; try again.")


def _note(files: NamedFiles, found: Iterable[str], intake: Intake) -> None:
    for name in found:
        intake.empty(name)
    if files.size(PICKLE_NAME) is not None:
        intake.empty(PICKLE_NAME)
