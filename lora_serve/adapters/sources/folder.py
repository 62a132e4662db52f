"""A folder of this machine, inside an allowed root (--adapter-root)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_serve.adapters.sources.folder_copy import copy_files, find_folder
from lora_serve.adapters.sources.intake import Progress


class FolderSource:
    """See AdapterSource. `source`: a path, absolute or relative to a root."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)

    def fetch(self, source: str, target: Path, limit: int, progress: Progress) -> str:
        """See AdapterSource. The card gets the folder's own name, not the path to it."""
        folder = find_folder(source, self._roots)
        copy_files(folder, target, limit, self._roots, progress)
        return f"folder {folder.name}"
