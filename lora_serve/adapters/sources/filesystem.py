"""A folder in a bucket, through fsspec (the extra `sources`).

Only object stores that the server's own configuration opens. Not supported are schemes that read this machine (file,
local, memory, dir, ...), wrap others (filecache, reference, anything with "::") or let the caller name a host (sftp).
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_serve.adapters.sources.base import Checksum, Intake, OnBytes, of_base64, of_bytes, of_s3, refuse, take_files
from lora_serve.core.errors import AdapterUnavailableError, LoraServeError

PACKAGES: Mapping[str, str] = {  # scheme -> the package that implements it
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oss": "ossfs",
    "oci": "ocifs",
}
_PIECE_BYTES = 8 * 2**20  # one range request
_READ_SECONDS = 300.0  # for each
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UNCLEAR = re.compile(r"::|[*?\[\]#@\\]")  # chains, patterns, versions, credentials
_log = logging.getLogger(__name__)


class FilesystemSource:
    """See AdapterSource. `source`: `SCHEME://bucket/folder`. Credentials are those of the server's environment."""

    def __init__(self, scheme: str, package: str, options: Mapping[str, Any] | None = None) -> None:
        """`package`: named in the error if it is missing. `options`: for the file system, for instance an endpoint."""
        self._scheme = scheme
        self._package = package
        self._options = dict(options or {})

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
        """A folder whose objects change meanwhile is refused."""
        folder = _folder(self._scheme, source)
        files = self._files(folder)
        with _readable_errors(self._scheme):
            take_files(files, Intake(target, limit, progress))
            files.check_unchanged()
        return f"{self._scheme}://{folder}"

    def _files(self, folder: str) -> _Objects:
        try:
            fsspec = importlib.import_module("fsspec")
            filesystem = fsspec.filesystem(self._scheme, **self._options)
        except ImportError:
            raise refuse(
                f"{self._scheme}:// needs a package that is not installed: pip install 'lora-serve[sources]'"
                + ("." if self._package == "s3fs" else f" {self._package}.")
            ) from None
        except Exception as error:  # depends on the file system and the server's configuration
            raise _unreadable(self._scheme, error) from None
        filesystem.invalidate_cache()
        return _Objects(filesystem, folder)


class _Objects:
    """See NamedFiles. Reads in ranges and remembers the first version of each object."""

    def __init__(self, filesystem: Any, folder: str) -> None:
        self._filesystem = filesystem
        self._folder = folder
        self._found: dict[str, tuple[int, str]] = {}
        self._checksums: dict[str, Checksum | None] = {}

    def size(self, name: str) -> int | None:
        path = f"{self._folder}/{name}"
        try:
            info = self._filesystem.info(path)
        except FileNotFoundError:
            return None
        if info.get("type") != "file" or info.get("size") is None:
            return None
        self._checksums[name] = self._declared(path, info)
        self._found[name] = int(info["size"]), str(self._filesystem.ukey(path))
        return self._found[name][0]

    def chunks(self, name: str) -> Iterator[bytes]:
        size = self._found[name][0]
        for start in range(0, size, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, size)
            yield self._read(f"{self._folder}/{name}", start, end)

    def checksum(self, name: str) -> Checksum | None:
        return self._checksums[name]

    def check_unchanged(self) -> None:
        """Raises AdapterUnavailableError."""
        self._filesystem.invalidate_cache()
        for name, (_, before) in self._found.items():
            if str(self._filesystem.ukey(f"{self._folder}/{name}")) != before:
                raise AdapterUnavailableError(f"{name} was changed while it was read; try again.")

    def _read(self, path: str, start: int, end: int) -> bytes:
        """Reads one range, with a timeout if the file system is asynchronous."""
        filesystem, wanted = self._filesystem, {"start": start, "end": end}
        if not filesystem.async_impl:
            return bytes(filesystem.cat_file(path, **wanted))
        cat_file = filesystem._cat_file  # noqa: SLF001 (fsspec's name for the coroutine)
        sync = importlib.import_module("fsspec.asyn").sync
        return bytes(sync(filesystem.loop, cat_file, path, **wanted, timeout=_READ_SECONDS))

    def _declared(self, path: str, info: Mapping[str, Any]) -> Checksum | None:
        """The checksum that the object store declares, by the name that each store uses."""
        if hasattr(self._filesystem, "call_s3"):
            bucket, _, key = path.partition("/")
            head = self._filesystem.call_s3("head_object", Bucket=bucket, Key=key, ChecksumMode="ENABLED")
            return of_s3(head["ResponseMetadata"]["HTTPHeaders"], bucket)
        azure = (info.get("content_settings") or {}).get("content_md5")
        return of_base64("md5", info.get("md5Hash")) or of_bytes("md5", azure)


def _folder(scheme: str, source: str) -> str:
    path = source[len(scheme) + len("://") :].removesuffix("/")
    bucket, *parts = path.split("/")
    if _UNCLEAR.search(source) or not _BUCKET.fullmatch(bucket) or any(part in ("", ".", "..") for part in parts):
        raise refuse(f"`source` must be {scheme}://bucket/folder: no ::, no patterns, no credentials, no ..")
    return path


@contextmanager
def _readable_errors(scheme: str) -> Iterator[None]:
    """File systems raise their libraries' exceptions, so any foreign one becomes AdapterUnavailableError."""
    try:
        yield
    except LoraServeError:
        raise
    except PermissionError:
        raise refuse(f"The server's credentials may not read this {scheme}:// folder.") from None
    except Exception as error:
        raise _unreadable(scheme, error) from None


def _unreadable(scheme: str, error: Exception) -> AdapterUnavailableError:
    _log.warning("%s source: %r", scheme, error)
    return AdapterUnavailableError(f"{scheme}:// cannot be read at present, or broke off ({type(error).__name__}).")
