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
_log = logging.getLogger(__name__)


class OrphanedBlobs:
    """The folder of the orphans, which is made for the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, blob: Path) -> None:
        """Move a blob's folder here, as it is. Raises OSError."""
        place = make_private(self.folder)
        now, number = int(time.time()), 0
        while (target := place / f"{blob.name}-{now}-{number}").exists():
            number += 1
        blob.rename(target)
        flush(place)
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
        """Remove orphans older than `days`; 0: none. Raises OSError."""
        if not days:
            return
        for digest, path in list(self.all()):
            if time.time() - int(path.name.split("-")[1]) > days * _DAY:
                _log.warning("blob %s was named by no catalog for %g days and is removed", digest, days)
                remove_folder(path)
