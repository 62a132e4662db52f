"""Unpacks an uploaded or fetched tar, tar.gz or zip of an adapter into files whose names are fixed here.

Only adapter_config.json and adapter_model.safetensors are taken, at the top or below one folder, and a tokenizer.json,
tokenizer_config.json, chat_template.jinja or generation_config.json beside them; other files are skipped. Links,
devices, absolute names and ".." are refused wherever they occur. Each stream is read to its end and checked against its
checksums, skipped members included.
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, cast

from lora_serve.adapters.archives.members import (
    BrokenArchiveError,
    ByteBudget,
    TarMember,
    ZipMember,
    read_members,
    read_zip_members,
)
from lora_serve.adapters.checkpoint.content import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MAX_SIDE_BYTES,
    SIDE_NAMES,
    WEIGHTS_NAME,
)
from lora_serve.adapters.regular_file import open_regular
from lora_serve.core.errors import InvalidAdapterError, PayloadTooLargeError

MAX_MEMBERS = 1000
MAX_SMALL_GZIP_MEMBERS = 1000
GZIP_MEMBER_BYTES = 4096  # of content, for each further member; bgzip's have 65280, others more
_GZIP_CHUNK_BYTES = 2**16
_GZIP_WINDOW = 31  # zlib's number for gzip
_NAMES = (CONFIG_NAME, WEIGHTS_NAME)
_CHUNK_BYTES = 2**20
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # the second: a zip without members
_OTHERS: Mapping[bytes, str] = {  # formats that an error names
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"LZIP": "lzip",
    b"\x1f\x9d": "compress",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"Rar!\x1a\x07": "RAR",
}
_MAX_MAGIC = max(map(len, _OTHERS))
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_BROKEN = (
    BrokenArchiveError,
    EOFError,
    NotImplementedError,  # zipfile: a compression method or version it lacks
    UnicodeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


class GzipStream:
    """The content of a gzip stream, read forwards and held against the checksums of its members, which may follow one
    another (RFC 1952), with zeros behind them.

    Python's `gzip` passes over members without content within one `read`, for as long as there are any: a short
    transfer that expands to millions of them would occupy a thread for minutes.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._member = zlib.decompressobj(_GZIP_WINDOW)
        self._num_members = 1
        self._num_bytes = 0

    def read(self, size: int) -> bytes:
        """`size` bytes, or fewer at the end. Raises BrokenArchiveError, zlib.error."""
        pieces = list[bytes]()
        while size and (piece := self._next_piece(size)):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _next_piece(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end."""
        packed = self._member.unconsumed_tail
        while not self._member.eof or (packed := self._next_start()):
            packed = packed or self._source.read(_GZIP_CHUNK_BYTES)
            if piece := self._member.decompress(packed, size):
                self._num_bytes += len(piece)
                return piece
            if not packed and not self._member.eof:
                raise BrokenArchiveError("its gzip stream is cut short")
            packed = b""
        return b""

    def _next_start(self) -> bytes:
        """The first bytes of the next member, which is begun; b"" if there is none."""
        start = self._member.unused_data.lstrip(b"\0")
        while not start and (chunk := self._source.read(_GZIP_CHUNK_BYTES)):
            start = chunk.lstrip(b"\0")
        if start:
            self._num_members += 1
            if self._num_members > MAX_SMALL_GZIP_MEMBERS + self._num_bytes // GZIP_MEMBER_BYTES:
                raise BrokenArchiveError("its gzip stream has too many members for so little content")
            self._member = zlib.decompressobj(_GZIP_WINDOW)
        return start


class _BoundedReader:
    """Reads forwards, `max_bytes` in all at most. `read` raises PayloadTooLargeError."""

    def __init__(self, source: IO[bytes], max_bytes: int) -> None:
        self._source = source
        self._budget = ByteBudget(max_bytes)

    def read(self, size: int) -> bytes:
        return self._budget.spend(self._source.read(size))


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Write the files into `folder`, which is private to the caller and empty.

    Raises InvalidAdapterError (no archive, broken, an illegal or missing member), PayloadTooLargeError (more than
    `max_bytes` decompressed), OSError.
    """
    taker = _Taker(folder, max_bytes)
    try:
        with open_regular(archive) as file:
            start = file.read(_MAX_MAGIC)
            file.seek(0)
            if start.startswith(_ZIP):
                _take_zip(file, taker, max_bytes)
            elif start.startswith(b"\x1f\x8b"):
                _take_tar(cast("IO[bytes]", GzipStream(file)), taker, max_bytes)
            else:
                _take_tar(file, taker, max_bytes)
    except _BROKEN as error:
        reason = _other_kind(start) or str(error)[:200]  # asked last: a tar may begin with any name
        raise InvalidAdapterError([f"this is not a sound tar, tar.gz or zip: {reason}"]) from None
    taker.check_complete()


def _other_kind(start: bytes) -> str | None:
    """The format that the first bytes tell; None: an unknown one."""
    found = [name for magic, name in _OTHERS.items() if start.startswith(magic)]
    return f"it is compressed with {found[0]}, which is not supported (gzip is)" if found else None


def _take_tar(source: IO[bytes], taker: _Taker, max_bytes: int) -> None:
    # Headers and skipped members count too, so a compression bomb ends here.
    bounded = cast("IO[bytes]", _BoundedReader(source, max_bytes + 4096 * MAX_MEMBERS))
    for member in read_members(bounded):
        taker.take(member.name, member.is_file, member.is_folder, member)


def _take_zip(file: IO[bytes], taker: _Taker, max_bytes: int) -> None:
    for member in read_zip_members(file, ByteBudget(max_bytes + 4096 * MAX_MEMBERS)):
        kind = stat.S_IFMT(member.info.external_attr >> 16)
        is_folder = member.info.filename.endswith("/")  # info.is_dir() fails on an empty name
        is_file = not is_folder and kind in (0, stat.S_IFREG)
        taker.take(member.info.filename, is_file, is_folder, member)


class _Taker:
    """Receives the members one by one; counts the bytes that may still come."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._num_members = 0
        self._parents: dict[str, PurePosixPath] = {}
        self._has_pickle = False
        self._sides: dict[PurePosixPath, Path] = {}  # by path: which ones belong to the adapter shows at the end

    def take(self, name: str, is_file: bool, is_folder: bool, member: TarMember | ZipMember) -> None:
        """Take the member if it is one of the files. Raises as `unpack` does."""
        path = self._checked(name, is_file or is_folder)
        self._has_pickle |= path.suffix in _PICKLES
        if path.name in SIDE_NAMES and not is_folder and len(path.parts) <= 2:
            self._take_side(path, member)
        if is_folder or path.name not in _NAMES or len(path.parts) > 2:
            return
        if path.name in self._parents:
            before = self._parents[path.name]
            if path.parent == before or "" not in (path.parent.name, before.name):
                raise InvalidAdapterError([f"{path.name} is in the archive twice"])
            if path.parent.name:  # a trainer's checkpoint below the files themselves
                return
            (self._folder / path.name).unlink()
        self._parents[path.name] = path.parent
        with (self._folder / path.name).open("xb") as file:
            self._copy(member, file, MAX_CONFIG_BYTES if path.name == CONFIG_NAME else self._max_bytes)

    def check_complete(self) -> None:
        """Raises InvalidAdapterError if a file is missing."""
        reasons = [
            f"{name} is not in the archive, neither at its top nor in one folder"
            for name in _NAMES
            if name not in self._parents
        ]
        if reasons and self._has_pickle:
            reasons.append("it holds a pickle instead: save the adapter as safetensors")
        if not reasons and len(set(self._parents.values())) > 1:
            reasons.append("the two files lie in different folders of the archive")
        if reasons:
            raise InvalidAdapterError(reasons)
        for path, file in self._sides.items():
            if path.parent == self._parents[CONFIG_NAME]:
                file.rename(self._folder / path.name)
            else:
                file.unlink()

    def _take_side(self, path: PurePosixPath, member: TarMember | ZipMember) -> None:
        if path in self._sides:
            raise InvalidAdapterError([f"{path.name} is in the archive twice"])
        self._sides[path] = self._folder / f"{len(self._sides)}-{path.name}"
        with self._sides[path].open("xb") as file:
            self._copy(member, file, MAX_SIDE_BYTES[path.name])

    def _checked(self, name: str, is_plain: bool) -> PurePosixPath:
        path = PurePosixPath(name)
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            raise InvalidAdapterError([f"the archive has more than {MAX_MEMBERS} members"])
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise InvalidAdapterError([f"the archive's member {name[:200]!r} points outside"])
        if not is_plain:
            raise InvalidAdapterError([f"the archive's member {name[:200]!r} is a link or device, not a file"])
        return path

    def _copy(self, member: TarMember | ZipMember, file: IO[bytes], most: int) -> None:
        """Writes a byte more than `most` at the most: a reader of the file sees that it is too large."""
        left = most + 1
        while chunk := member.read(min(_CHUNK_BYTES, self._left + 1)):
            self._left -= len(chunk)
            if self._left < 0:
                raise PayloadTooLargeError(
                    f"The archive's content exceeds --max-upload-size ({self._max_bytes} bytes)."
                )
            left -= file.write(chunk[:left])
