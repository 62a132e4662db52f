"""Reads a tar forwards with bounded memory.

Python's `tarfile` reads extended headers of any size into memory and its extraction filters have known bypasses; this
reader knows what an archive of a few files needs (POSIX.1-2001 ustar and pax, GNU long names).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

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
            told = {"path": _text(content.partition(b"\0")[0])} if kind == b"L" else _name_and_size(records)
            if kind == b"g" and told:
                raise BrokenArchiveError("a header of all members gives a name or a size")
            longer |= told
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
