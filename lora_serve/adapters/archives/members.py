"""Reads the members of a tar or a zip one after another, with bounded memory.

Python's `tarfile` reads extended headers of any size into memory, searches them with a pattern that takes seconds for
64 KiB (CVE-2024-6232), takes sizes such as `1_0` and `-8`, and its extraction filters have known bypasses; the reader
here knows what an archive of a few files needs (POSIX.1-2001 ustar and pax, GNU long names).

`zipfile` believes the central directory; here each member is read to its end and against its CRC, and a local header
that says something else, a gap before the first member and bytes behind the directory's end are refused too
(APPNOTE.TXT 4.3, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT).
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

from lora_serve.core.errors import PayloadTooLargeError

BLOCK = 512
MAX_EXTENDED_BYTES = 65536
MAX_ALL_EXTENDED_BYTES = 4 * 2**20  # of a whole archive: compressed they are almost nothing
MAX_RECORDS = 50_000  # in the pax headers of a whole archive; usual programs write some ten for a member
_CHUNK_BYTES = 2**20
_FILE = (b"0", b"\0", b"7")
_FOLDER = (b"5", b"D")  # D: GNU incremental archives; the content is a list of names
_PAX = (b"x", b"g")
_ABOUT_NEXT = (b"x", b"L", b"g", b"K")
_ABOUT_OTHERS = (*_ABOUT_NEXT, b"V")  # V: GNU volume label
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_LOCAL_MAGIC = b"PK\x03\x04"
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_END = struct.Struct("<4sHHHHIIH")
_END_MAGIC = b"PK\x05\x06"
_MAX_COMMENT = 0xFFFF
_ENCRYPTED, _DESCRIBED_BEHIND = 0x0001, 0x0008
_IN_EXTRA = 0xFFFFFFFF  # in place of a size that stands in the ZIP64 field
MAX_READ_BYTES = 2**20  # of the directory, at once


class BrokenArchiveError(Exception):
    """The archive is malformed; the text says how."""


@dataclass(slots=True)
class TarMember:
    """One member, whose content is to be read before the next one is asked for."""

    name: str
    is_file: bool
    is_folder: bool
    left: int  # bytes not read yet
    _source: IO[bytes]

    def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end. Raises BrokenArchiveError if the archive ends too early."""
        chunk = self._source.read(min(size, self.left))
        if not chunk and self.left and size:
            raise BrokenArchiveError("it is truncated")
        self.left -= len(chunk)
        return chunk


def read_members(source: IO[bytes]) -> Iterator[TarMember]:
    """The members of the tar that `source` yields, which is read to its end. Raises BrokenArchiveError.

    A tar ends with two blocks of zeros; only zeros may follow, so that a gzip around it is read up to its checksum.
    """
    longer: dict[str, str] = {}
    left, records_left, is_next_awaited = MAX_ALL_EXTENDED_BYTES, MAX_RECORDS, False
    while (header := _read_header(source)) is not None:
        kind, size = header[156:157], _number(header[124:136])
        is_next_awaited = kind in _ABOUT_NEXT or (is_next_awaited and kind in _ABOUT_OTHERS)
        if kind in _ABOUT_OTHERS:
            left -= BLOCK + size
            if left < 0:
                raise BrokenArchiveError("its extended headers have no end")
            content = _content(source, size)
            records = _records(content) if kind in _PAX else []
            records_left -= len(records)
            if records_left < 0:
                raise BrokenArchiveError(f"its pax headers have more than {MAX_RECORDS} records")
            noted = {"path": _text(content.partition(b"\0")[0])} if kind == b"L" else _name_and_size(records)
            if kind == b"g" and noted:
                raise BrokenArchiveError("a header of all members gives a name or a size")
            longer |= noted
        else:
            yield from _member(source, header, int(longer.get("size", size)), longer.get("path"))
            longer = {}
    if is_next_awaited:
        raise BrokenArchiveError("an extended header stands before no member")
    _check_end(source)


def _member(source: IO[bytes], header: bytes, size: int, name: str | None) -> Iterator[TarMember]:
    kind = header[156:157]
    if name == "":  # some readers take it, others the header's own
        raise BrokenArchiveError("an extended header gives an empty name")
    name = name or _name(header)
    is_folder = kind in _FOLDER or (kind in _FILE and name.endswith("/"))
    if is_folder and size and kind != b"D":  # some readers pass it over, others read on in it
        raise BrokenArchiveError("a folder has content")
    member = TarMember(name, kind in _FILE and not is_folder, is_folder, size, source)
    padding = -size % BLOCK
    yield member
    while member.left:
        member.read(_CHUNK_BYTES)
    source.read(padding)


def _read_header(source: IO[bytes]) -> bytes | None:
    """None: the first block of the archive's end."""
    header = source.read(BLOCK)
    if len(header) < BLOCK:
        raise BrokenArchiveError("it is truncated, or was written without the two blocks of zeros at its end")
    if header == bytes(BLOCK):
        return None
    plain = header[:148] + b" " * 8 + header[156:]
    if _number(header[148:156]) != sum(plain):
        raise BrokenArchiveError("a header's checksum is wrong")
    return header


def _check_end(source: IO[bytes]) -> None:
    if len(rest := source.read(BLOCK)) < BLOCK:
        raise BrokenArchiveError("it is truncated: it lacks the second block of its end")
    while rest:
        if rest.strip(b"\0"):
            raise BrokenArchiveError("something stands behind its end")
        rest = source.read(_CHUNK_BYTES)


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's base 256 for sizes over 8 GiB
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.translate(None, b"01234567"):
        raise BrokenArchiveError("a header holds no octal number")
    return int(digits or b"0", 8)


def _name(header: bytes) -> str:
    name = _text(header[:100].partition(b"\0")[0])
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return f"{_text(prefix)}/{name}" if prefix else name


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _content(source: IO[bytes], size: int) -> bytes:
    if size > MAX_EXTENDED_BYTES:
        raise BrokenArchiveError(f"an extended header has {size} bytes")
    content = source.read(size + -size % BLOCK)[:size]
    if len(content) < size:
        raise BrokenArchiveError("it is truncated")
    return content


def _records(content: bytes) -> list[tuple[bytes, bytes]]:
    """The keys and values of a pax header, each "<length> <key>=<value>\\n"."""
    records, at = list[tuple[bytes, bytes]](), 0
    while at < len(content):
        length, _, _ = content[at : at + 7].partition(b" ")
        space = at + len(length)
        end = at + int(length) if len(length) < 7 and length.isdigit() else 0
        if not space < end <= len(content):
            raise BrokenArchiveError("a pax header is broken")
        key, _, value = content[space + 1 : end - 1].partition(b"=")
        records.append((key, value))
        at = end
    return records


def _name_and_size(records: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """The next member's real name and size, if its pax header tells them."""
    found = {}
    for key, value in records:
        if key.startswith(b"GNU.sparse") or (key == b"size" and not value[:20].isdigit()):
            raise BrokenArchiveError("sparse files are not supported")
        if key == b"path":
            found["path"] = _text(value)
        elif key == b"size":
            found["size"] = _text(value[:20])
    return found


class ByteBudget:
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
    _budget: ByteBudget
    _source: IO[bytes] | None = None
    num_bytes: int = field(default=0)

    def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end. Raises BadZipFile, BrokenArchiveError."""
        if self._source is None:
            self._source = self._archive.open(self.info)
        chunk = self._budget.spend(self._source.read(size))
        self.num_bytes += len(chunk)
        if not chunk and size and self.num_bytes != self.info.file_size:
            raise BrokenArchiveError("a member is not as long as the directory says")
        return chunk

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def read_zip_members(file: IO[bytes], budget: ByteBudget) -> Iterator[ZipMember]:
    """The members of a zip. Raises PayloadTooLargeError, BrokenArchiveError and what `zipfile` raises."""
    capped = CappedFile(file, _end_of(CappedFile(file)))
    with zipfile.ZipFile(cast("IO[bytes]", capped)) as archive:
        _check_start(archive)
        for info in archive.infolist():
            if info.flag_bits & _ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise BrokenArchiveError("it is encrypted, or compressed by something other than deflate")
            member = ZipMember(info, archive, budget)
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
