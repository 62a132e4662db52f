"""A folder that is to hold an exported registry and nothing else: no lock, no name of a server, no key.

While the export is not complete a file says so; without it, a folder that is not empty is not touched.
"""

from __future__ import annotations

from pathlib import Path

from lora_serve.adapters.maintenance.registries import OpenRegistry, RegistryAddress
from lora_serve.adapters.stores.files import FILE_MODE, flush, make_private
from lora_serve.core.errors import ConfigError

MARK = "export.incomplete"


def is_unfinished(folder: Path) -> bool:
    """Whether an export into the folder broke off, or could not take everything."""
    return (folder / MARK).is_file()


def mark(address: RegistryAddress) -> None:
    """Make the folder, or take up an export that was broken off. Raises ConfigError."""
    folder = address.folder
    try:
        if folder.exists() and any(folder.iterdir()) and not is_unfinished(folder):
            raise ConfigError(f"{address.flag} {folder}: expected a folder that is new or empty.")
        make_private(folder)
        (folder / MARK).touch(FILE_MODE)
        flush(folder)
    except OSError as error:
        raise ConfigError(f"{address.flag} {folder}: the folder cannot be used: {error.strerror}") from None


def finish(place: OpenRegistry) -> None:
    """The export is complete. Raises OSError."""
    folder = place.address.folder
    place.tmp.rmdir()
    (folder / "lock").unlink()  # while we hold it: whoever opens the folder from now on makes a new one
    (folder / MARK).unlink()
    flush(folder)
