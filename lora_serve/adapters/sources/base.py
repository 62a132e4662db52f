"""The seam between a registration and the sources of files: how far it has come, and how files are taken in."""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lora_serve.adapters.checkpoint.content import (
    CONFIG_NAME,
    MAX_SIDE_BYTES,
    SIDE_NAMES,
    WEIGHTS_NAME,
)
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidAdapterError,
    InvalidRequestError,
    PayloadTooLargeError,
)

NAMES = (CONFIG_NAME, WEIGHTS_NAME)
PICKLE_NAME = "adapter_model.bin"
CHUNK_BYTES = 2**20
OnBytes = Callable[[int], None]  # gets the bytes so far; an exception aborts the transfer
_HEX = re.compile(r"[0-9a-f]+")
_ETAGS: Mapping[int, tuple[str, ...]] = {64: ("sha256",), 40: ("git", "sha1")}  # a hub's ETags by length


def no_progress(num_bytes: int) -> None:
    """Ignores the progress."""


class Stage(enum.StrEnum):
    """The steps of a registration, in their order."""

    RECEIVING = "receiving"  # an upload's bytes
    FETCHING = "fetching"  # a source's bytes
    EXAMINING = "examining"  # files, names, shapes and values; before that it waits for its tenant's turn
    PROBING = "probing"  # a forward pass with the adapter; then it is pinned, where that is asked for


@dataclass(slots=True, eq=False)
class RegistrationProgress:
    """How far one registration has come; written by the thread that works on it, read by any."""

    id: str
    scope: str | None  # the tenant that registers; None: a caller that sees all
    stage: Stage
    num_bytes: int = 0  # that came so far
    total_bytes: int | None = None  # None: not known
    started: float = field(default_factory=time.time)  # Unix seconds

    def receive(self, num_bytes: int) -> None:
        """Note how many bytes came in all."""
        self.num_bytes = num_bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """Files that are ready to be registered. Their holder removes `folder`, or hands it to a registration."""

    folder: Path
    source: str  # as the card says it


class Intake:
    """Writes an adapter's files into `folder`, `limit` bytes in all at most."""

    def __init__(self, folder: Path, limit: int, progress: OnBytes = no_progress) -> None:
        self._folder = folder
        self._limit = limit
        self._progress = progress
        self._num_bytes = 0

    def check_size(self, num_bytes: int) -> None:
        """Check a size that is known before the first byte moves. Raises PayloadTooLargeError."""
        if num_bytes > self._limit - self._num_bytes:
            raise PayloadTooLargeError(f"The adapter's files exceed --max-upload-size ({self._limit} bytes).")

    def take(self, name: str, chunks: Iterable[bytes]) -> int:
        """Write `name`, one of NAMES; returns its bytes. Raises PayloadTooLargeError, OSError, what `chunks` raises."""
        assert name in NAMES, name
        return self.write(self._folder / name, chunks)

    def take_side(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write one of SIDE_NAMES; one that is too large is left empty: only adapters that need it are refused."""
        assert name in SIDE_NAMES, name
        path, before = self._folder / name, self._num_bytes
        try:
            self.write(path, _at_most(chunks, MAX_SIDE_BYTES[name], name))
        except PayloadTooLargeError:
            self._num_bytes = before
            self.empty(name)

    def empty(self, name: str) -> None:
        """Write `name` without content: only its presence counts (artifact.check_files, added_tokens)."""
        (self._folder / name).write_bytes(b"")

    def beat(self) -> None:
        """Report progress although no byte has arrived here yet, so that the transfer can be aborted."""
        self._progress(self._num_bytes)

    def write(self, path: Path, chunks: Iterable[bytes]) -> int:
        """Write any private file, for instance an archive; returns its bytes. Raises as `take` does."""
        before = self._num_bytes
        with path.open("wb") as file:
            for chunk in chunks:
                self.check_size(len(chunk))
                file.write(chunk)
                self._num_bytes += len(chunk)
                self._progress(self._num_bytes)
        return self._num_bytes - before


def _at_most(chunks: Iterable[bytes], limit: int, name: str) -> Iterable[bytes]:
    left = limit
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise PayloadTooLargeError(f"{name} is larger than {limit} bytes.")
        yield chunk


class AdapterSource(Protocol):
    """One kind of source. Called on worker threads, several at once; has no state of a transfer."""

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
        """Bring adapter_config.json, adapter_model.safetensors and tokenizer.json, and nothing else, into `target`.

        `target`: an empty private folder, beside which scratch folders may be made; after an error the caller removes
        it. `limit`: bytes in all. An exception of `progress` aborts the transfer. A missing file is left out (or
        InvalidAdapterError); an empty `adapter_model.bin` may stand in its place, for a better error.

        Returns the source for the adapter's card, without credentials. Raises InvalidRequestError (param="source":
        malformed, not found, not allowed), InvalidAdapterError, PayloadTooLargeError, AdapterUnavailableError
        (unreachable, cut short, changed meanwhile), OSError (from writing into `target`).
        """


def refuse(message: str) -> InvalidRequestError:
    """The error for a source that the caller must correct."""
    return InvalidRequestError(message, param="source")


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
