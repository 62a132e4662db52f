"""Folders that are there whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def into_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Write beside, then rename: an interrupted run leaves no half checkpoint."""
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write(beside)
    beside.rename(folder)
