"""Makes a folder atomically."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def into_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a temporary folder and renames it, so that an interrupted run leaves no incomplete checkpoint."""
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write(beside)
    beside.rename(folder)
