"""Adapter files in a local folder: STORE/blobs/<hex>/{adapter_config.json, adapter_model.safetensors}."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_serve.adapters.checkpoint.artifact import check_files
from lora_serve.adapters.checkpoint.digest import WEIGHTS_NAME, adapter_digest, content_names
from lora_serve.adapters.checkpoint.safetensors_header import read_header
from lora_serve.adapters.stores.files import (
    FILE_MODE,
    flush,
    link_or_copy,
    make_private,
    new_folder,
    remove_folder,
    scratch_folder,
)
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_log = logging.getLogger(__name__)


class DiskStore:
    """Content-addressed and crash-safe: a blob is built in STORE/tmp, flushed, then renamed into place."""

    def __init__(self, store: Path) -> None:
        """Raises OSError if the folder cannot be made."""
        self._blobs = make_private(store / "blobs")
        self._tmp = make_private(store / "tmp")
        self._quarantine = store / "quarantine"

    def put(self, digest: str, folder: Path) -> None:
        """See AdapterStore. A broken blob of the same digest is replaced."""
        blob = self._blob(digest)
        with _readable_errors(), scratch_folder(self._tmp) as scratch:
            if blob.exists():
                if is_sound(blob, digest):
                    return
                self._set_aside(blob)
            for name in content_names(folder):
                link_or_copy(folder / name, scratch / name)
            flush(scratch)
            self._rename(scratch, blob)

    @contextmanager
    def open(self, digest: str) -> Iterator[Path]:
        """See AdapterStore. The blob itself, nothing is copied."""
        blob = self._blob(digest)
        if not blob.is_dir():
            raise AdapterUnavailableError(f"The adapter store does not have {digest}.")
        yield blob

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """Put a file of ours into the blob's folder, which goes wherever the blob goes; it is no part of the digest.

        Not flushed: whoever reads it must see by itself whether it is whole. Raises OSError, also if there is no blob.
        """
        with scratch_folder(self._tmp) as scratch:
            (scratch / name).write_bytes(content)
            (scratch / name).chmod(FILE_MODE)
            (scratch / name).rename(self._blob(digest) / name)

    def has(self, digest: str) -> bool:
        """See AdapterStore."""
        return self._blob(digest).is_dir()

    def delete(self, digest: str) -> None:
        """See AdapterStore. Renamed away first, so that half a blob is never seen."""
        blob = self._blob(digest)
        with _readable_errors(), scratch_folder(self._tmp) as scratch:
            if blob.is_dir():
                blob.rename(scratch / "blob")
                flush(self._blobs)

    def digests(self) -> frozenset[str]:
        """See AdapterStore."""
        with _readable_errors():
            return frozenset("sha256:" + blob.name for blob in self._blobs.iterdir() if _HEX.match(blob.name))

    def sweep(self, named: frozenset[str]) -> None:
        """At start: remove what a crash left over and what no one names, set broken blobs aside. Raises OSError.

        The check is of the files' form only; their digests are checked whenever they are loaded.
        """
        for folder in self._tmp.iterdir():
            remove_folder(folder)
        for blob in list(self._blobs.iterdir()):
            if "sha256:" + blob.name not in named:
                blob.rename(new_folder(self._tmp) / "blob")
            elif not _is_well_formed(blob):
                self._set_aside(blob)
        for folder in self._tmp.iterdir():
            remove_folder(folder)

    def _blob(self, digest: str) -> Path:
        name = digest.removeprefix("sha256:")
        assert _HEX.match(name), digest
        return self._blobs / name

    def _rename(self, scratch: Path, blob: Path) -> None:
        try:
            scratch.rename(blob)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another thread put the same content first
                raise
        flush(self._blobs)

    def _set_aside(self, blob: Path) -> None:
        place = make_private(self._quarantine) / f"{blob.name}-{time.time_ns()}"
        _log.warning("blob %s is broken; moved to %s", blob.name, place)
        blob.rename(place)


def is_sound(folder: Path, digest: str) -> bool:
    """Whether the folder holds exactly what `digest` names."""
    try:
        return adapter_digest(folder) == digest
    except OSError:
        return False


def _is_well_formed(blob: Path) -> bool:
    try:
        check_files(blob)
        read_header(blob / WEIGHTS_NAME)
    except (InvalidAdapterError, OSError):
        return False
    return True


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("adapter store: %r", error)
        reason = os.strerror(error.errno) if error.errno else "input/output error"
        raise AdapterUnavailableError(f"The adapter store on disk cannot be used at present: {reason}.") from None
