"""Orphaned blobs: unknown to the catalog, so they are kept, each with its records, for some days.

An unknown blob is not deleted at once, as the catalog may have been lost, or be an older copy. A folder is named
`<hex of the digest>-<when it was set aside, Unix seconds>-<number>`, so that copying or touching it does not extend its
time.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from lora_serve.adapters.stores.files import flush, make_private, remove_folder

_NAME = re.compile(r"([0-9a-f]{64})-([0-9]{1,12})-[0-9]+\Z")
_DAY = 86400.0
_FIRST_TIME = 1_767_225_600  # 2026-01-01, Unix seconds: before it there was no such folder, and the clock was not set
_log = logging.getLogger(__name__)


class OrphanedBlobs:
    """The folder of the orphans, which is made for the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, blob: Path) -> None:
        """Move a blob's folder here, as it is. Raises OSError."""
        make_private(self.folder)
        target = self._stamped(blob, blob.name)
        _log.warning("blob %s is named by no catalog; it is kept in %s", blob.name, target)

    def all(self) -> Iterator[tuple[str, Path]]:
        """The digests with their folders; a digest may occur more than once. Raises OSError."""
        if self.folder.is_dir():
            for path in sorted(self.folder.iterdir()):
                if named := _NAME.match(path.name):
                    yield "sha256:" + named[1], path

    def drop(self, digests: Collection[str]) -> None:
        """Remove the orphans of these digests, which are in use again. Raises OSError."""
        for digest, path in list(self.all()):
            if digest in digests:
                remove_folder(path)

    def expire(self, days: float) -> None:
        """Remove orphans older than `days`; 0: none. The days of one begin anew if its time, which a wrong clock gave,
        cannot be right. Raises OSError.
        """
        if not days:
            return
        now = time.time()
        for digest, path in list(self.all()):
            name, stamp, _ = path.name.split("-")
            if not _FIRST_TIME <= int(stamp) <= now:
                self._stamped(path, name)
            elif now - int(stamp) > days * _DAY:
                _log.warning("blob %s was named by no catalog for %g days and is removed", digest, days)
                remove_folder(path)

    def _stamped(self, folder: Path, name: str) -> Path:
        """Where the folder is once it is renamed to this name and the present time."""
        now, number = int(time.time()), 0
        while (target := self.folder / f"{name}-{now}-{number}").exists():
            number += 1
        folder.rename(target)
        flush(self.folder)
        return target
