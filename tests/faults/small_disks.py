"""Disks that get full or are mounted read-only: real ones where this process may mount them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SmallDisk:
    """A file system of 8 MiB at `place`; where none can be mounted an ordinary folder, whose modes then say no."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        self.is_mounted = _ran("mount", "-t", "tmpfs", "-o", "size=8m", "none", place)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Not a byte is free."""
        if not self.is_mounted:
            with self.read_only():
                yield
            return
        filler = self.place / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert os.statvfs(self.place).f_bavail == 0
        try:
            yield
        finally:
            filler.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be made or changed. Nobody may have a file open for writing."""
        if self.is_mounted:
            assert _ran("mount", "-o", "remount,ro", self.place)
        else:
            self._set_modes(0o500, 0o400)
        try:
            yield
        finally:
            if self.is_mounted:
                assert _ran("mount", "-o", "remount,rw", self.place)
            else:
                self._set_modes(0o700, 0o600)

    def close(self) -> None:
        if self.is_mounted:
            assert _ran("umount", "-l", self.place)

    def _set_modes(self, folders: int, files: int) -> None:
        for path in [self.place, *self.place.rglob("*")]:
            path.chmod(folders if path.is_dir() else files)


def _ran(*command: str | Path) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
