"""Fetches from sources that keep an adapter's files by name: sizes first, then only the needed bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from lora_serve.adapters.checkpoint.digest import SIDE_NAMES
from lora_serve.adapters.sources.checksum import Checksum, checked
from lora_serve.adapters.sources.intake import MAX_SIDE_BYTES, NAMES, PICKLE_NAME, Intake
from lora_serve.core.errors import AdapterUnavailableError


class NamedFiles(Protocol):
    """Files that are read by allow-listed names only; a folder is never listed."""

    def size(self, name: str) -> int | None:
        """The bytes of a file; None if there is none."""

    def chunks(self, name: str) -> Iterable[bytes]:
        """The content of a file, in pieces."""

    def checksum(self, name: str) -> Checksum | None:
        """The checksum that the source declares, or None. Called after `size`."""


def take_files(files: NamedFiles, intake: Intake) -> None:
    """Fetch all files; if one of the two required files is missing, only note which files exist.

    Raises PayloadTooLargeError before a byte moves, AdapterUnavailableError for a file that ends too early,
    InvalidAdapterError for one whose checksum differs.
    """
    sizes = {name: size for name in NAMES if (size := files.size(name)) is not None}
    if len(sizes) < len(NAMES):
        _note(files, sizes, intake)
        return
    intake.check_size(sum(sizes.values()))
    for name, size in sizes.items():
        intake.take(name, _whole(files, name, size))
    for name in SIDE_NAMES:
        found = files.size(name)
        if found is not None and found <= MAX_SIDE_BYTES[name]:
            intake.take_side(name, _whole(files, name, found))
        elif found is not None:
            intake.empty(name)


def _whole(files: NamedFiles, name: str, size: int) -> Iterator[bytes]:
    """The content, checked against the declared size and checksum."""
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
