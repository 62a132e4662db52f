"""Reads the members of a zip, each to its end and against its CRC, and compares the two places that describe them.

`zipfile` believes the central directory; here a local header that says something else, a gap before the first member
and bytes behind the directory's end are refused too (APPNOTE.TXT 4.3, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT).
"""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, cast

from lora_serve.adapters.archives.tar import BrokenArchiveError
from lora_serve.core.errors import PayloadTooLargeError

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_LOCAL_MAGIC = b"PK\x03\x04"
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_END = struct.Struct("<4sHHHHIIH")
_END_MAGIC = b"PK\x05\x06"
_MAX_COMMENT = 0xFFFF
_ENCRYPTED, _DESCRIBED_BEHIND = 0x0001, 0x0008
_IN_EXTRA = 0xFFFFFFFF  # in place of a size that stands in the ZIP64 field
_CHUNK_BYTES = 2**20
MAX_READ_BYTES = 2**20  # of the directory, at once


class ByteAllowance:
    """The number of bytes that an archive may still yield."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def spend(self, chunk: bytes) -> bytes:
        """The chunk, counted. Raises PayloadTooLargeError."""
        self._left -= len(chunk)
        if self._left < 0:
            raise PayloadTooLargeError("The archive's content exceeds --max-upload-size.")
        return chunk


class CappedFile(io.RawIOBase):
    """A file for `zipfile`, which reads a whole central directory at once: no more than MAX_READ_BYTES in one read."""

    def __init__(self, file: IO[bytes], size: int | None = None) -> None:
        """`size`: bytes that are shown, from the start on; None: all."""
        super().__init__()
        self._file = file
        self._size = os.fstat(file.fileno()).st_size if size is None else size

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises BadZipFile if that is too much at once."""
        left = max(self._size - self._file.tell(), 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > MAX_READ_BYTES:
            raise zipfile.BadZipFile("its directory is too long")
        return self._file.read(wanted)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Raises BadZipFile for a place before the file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._file.tell(), os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise zipfile.BadZipFile("an offset points outside")
        return self._file.seek(min(base + offset, self._size))

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


@dataclass(slots=True)
class ZipMember:
    """One member, opened at its first read; what is left of it is read before the next one comes."""

    info: zipfile.ZipInfo
    _archive: zipfile.ZipFile
    _allowance: ByteAllowance
    _source: IO[bytes] | None = None
    num_bytes: int = field(default=0)

    def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end. Raises BadZipFile, BrokenArchiveError."""
        if self._source is None:
            self._source = self._archive.open(self.info)
        chunk = self._allowance.spend(self._source.read(size))
        self.num_bytes += len(chunk)
        if not chunk and size and self.num_bytes != self.info.file_size:
            raise BrokenArchiveError("a member is not as long as the directory says")
        return chunk

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def read_zip_members(file: IO[bytes], allowance: ByteAllowance) -> Iterator[ZipMember]:
    """The members of a zip. Raises PayloadTooLargeError, BrokenArchiveError and what `zipfile` raises."""
    capped = CappedFile(file, _end_of(CappedFile(file)))
    with zipfile.ZipFile(cast("IO[bytes]", capped)) as archive:
        _check_start(archive)
        for info in archive.infolist():
            if info.flag_bits & _ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise BrokenArchiveError("it is encrypted, or compressed by something other than deflate")
            member = ZipMember(info, archive, allowance)
            yield member
            while member.read(_CHUNK_BYTES):
                pass
            member.close()
            _check_local(capped, info)


def _end_of(file: CappedFile) -> int:
    """The place behind the directory's end record, whose comment is the rest of the file.

    `zipfile` takes the last record that it sees, even one inside the comment, so the comment is kept from it.
    """
    start = max(file.seek(0, 2) - _END.size - _MAX_COMMENT, 0)
    file.seek(start)
    tail = file.read(_END.size + _MAX_COMMENT)
    places = [match.start() for match in re.finditer(re.escape(_END_MAGIC), tail)]
    ends = [place + _END.size for place in places if _comment_length(tail, place) == len(tail) - place - _END.size]
    if len(ends) != 1:
        raise BrokenArchiveError("something stands behind its end, or its end is missing or there twice")
    return start + ends[0]


def _comment_length(tail: bytes, place: int) -> int:
    return int.from_bytes(tail[place + _END.size - 2 : place + _END.size], "little")


def _check_start(archive: zipfile.ZipFile) -> None:
    """The first member begins at the file's start."""
    if archive.infolist() and min(info.header_offset for info in archive.infolist()) != 0:
        raise BrokenArchiveError("its first member does not begin where it should")


def _check_local(file: CappedFile, info: zipfile.ZipInfo) -> None:
    """The member's local header, and the description behind its content where there is one, agree with the directory.

    `zipfile` has compared the names.
    """
    file.seek(info.header_offset)
    header = _LOCAL.unpack(_exactly(file, _LOCAL.size))
    magic, _, flags, method, _, _, crc, packed, size, name_length, extra_length = header
    is_behind = bool(flags & _DESCRIBED_BEHIND)
    wanted = (info.CRC, info.compress_size, info.file_size)
    if magic != _LOCAL_MAGIC or flags != info.flag_bits or method != info.compress_type:
        raise BrokenArchiveError("a member's header and the directory differ")
    if is_behind:
        file.seek(info.header_offset + _LOCAL.size + name_length + extra_length + info.compress_size)
        if not _is_described(file.read(4 + 4 + 8 + 8), wanted):
            raise BrokenArchiveError("the description behind a member and the directory differ")
    elif crc != info.CRC or not _agree((packed, size), wanted[1:]):
        raise BrokenArchiveError("a member's header and the directory differ")


def _is_described(text: bytes, wanted: tuple[int, int, int]) -> bool:
    """With or without its magic number, sizes of 4 or of 8 bytes: writers do it in all four ways."""
    forms = [struct.pack("<I", wanted[0]) + struct.pack("<QQ", *wanted[1:])]
    if max(wanted) < _IN_EXTRA:
        forms.append(struct.pack("<III", *wanted))
    return any(text.startswith((form, _DESCRIPTOR_MAGIC + form)) for form in forms)


def _agree(local: tuple[int, int], wanted: tuple[int, ...]) -> bool:
    return all(one in (other, _IN_EXTRA) for one, other in zip(local, wanted, strict=True))


def _exactly(file: CappedFile, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise BrokenArchiveError("it is truncated")
    return content
