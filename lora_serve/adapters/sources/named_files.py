"""Fetches from sources that keep an adapter's files by name: sizes first, then only the needed bytes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lora_serve.adapters.checkpoint.content import MAX_SIDE_BYTES, SIDE_NAMES
from lora_serve.adapters.sources.base import NAMES, PICKLE_NAME, Intake
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError

_HEX = re.compile(r"[0-9a-f]+")
_ETAGS: Mapping[int, tuple[str, ...]] = {64: ("sha256",), 40: ("git", "sha1")}  # a hub's ETags by length


@dataclass(frozen=True, slots=True)
class Checksum:
    """A digest under one of `kinds`: hashlib's names, "git" (SHA-1 of a git blob), "crc32"."""

    kinds: tuple[str, ...]
    digest: bytes


def checked(chunks: Iterable[bytes], size: int, checksum: Checksum | None, what: str) -> Iterator[bytes]:
    """The chunks, `size` bytes in all. Raises InvalidAdapterError at their end if the checksum differs."""
    hashes = [] if checksum is None else [_hash(kind, size) for kind in checksum.kinds]
    for chunk in chunks:
        for each in hashes:
            each.update(chunk)
        yield chunk
    if checksum is not None and checksum.digest not in [each.digest() for each in hashes]:
        raise InvalidAdapterError([f"{what} came damaged: its checksum is not the one that its source names"])


def of_hub(etag: str | None) -> Checksum | None:
    """The checksum in a hub's ETag: SHA-256 for files in LFS, else git's; mirrors use a plain SHA-1."""
    text = (etag or "").strip('"').lower()
    kinds = _ETAGS.get(len(text)) if _HEX.fullmatch(text) else None
    return None if kinds is None else Checksum(kinds, bytes.fromhex(text))


def of_s3(headers: Mapping[str, str], host: str) -> Checksum | None:
    """The checksum in S3's response to GET or HEAD; `headers` with lower-case names.

    The ETag is an MD5 unless the object was uploaded in parts (then it has a dash), is encrypted under a key of its
    own, or is in a directory bucket (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html).
    """
    if headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
        whole = of_base64("sha256", headers.get("x-amz-checksum-sha256"))
        if whole is not None:
            return whole
    is_plain = headers.get("x-amz-server-side-encryption", "AES256") == "AES256"
    is_own = "x-amz-server-side-encryption-customer-algorithm" in headers
    etag = headers.get("etag", "").strip('"')
    if not is_plain or is_own or "--x-s3" in host or len(etag) != 32 or not _HEX.fullmatch(etag):
        return None
    return Checksum(("md5",), bytes.fromhex(etag))


def of_base64(kind: str, text: str | None) -> Checksum | None:
    """The checksum; None if this is no digest of the kind."""
    try:
        digest = base64.b64decode(text or "", validate=True)
    except (binascii.Error, ValueError):
        return None
    return of_bytes(kind, digest)


def of_bytes(kind: str, digest: bytes | bytearray | None) -> Checksum | None:
    """The checksum; None if this is no digest of the kind."""
    return Checksum((kind,), bytes(digest)) if digest and len(digest) == _hash(kind, 0).digest_size else None


def _hash(kind: str, size: int) -> Any:
    if kind == "git":
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return _Crc32() if kind == "crc32" else hashlib.new(kind, usedforsecurity=False)


class _Crc32:
    """CRC-32 with the interface of hashlib."""

    digest_size = 4

    def __init__(self) -> None:
        self._value = 0

    def update(self, chunk: bytes) -> None:
        self._value = zlib.crc32(chunk, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


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
