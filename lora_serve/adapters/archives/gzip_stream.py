"""Reads a gzip stream forwards: members that may follow one another (RFC 1952), and zeros behind them.

Python's `gzip` passes over members without content within one `read`, for as long as there are any: a short transfer
that expands to millions of them would occupy a thread for minutes.
"""

from __future__ import annotations

import zlib
from typing import IO

from lora_serve.adapters.archives.tar import BrokenArchiveError

MAX_SMALL_MEMBERS = 1000
MEMBER_BYTES = 4096  # of content, for each further member; bgzip's have 65280, others more
_CHUNK_BYTES = 2**16
_WINDOW = 31  # zlib's number for gzip


class GzipStream:
    """The content, read forwards and held against the members' checksums."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._member = zlib.decompressobj(_WINDOW)
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
            packed = packed or self._source.read(_CHUNK_BYTES)
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
        while not start and (chunk := self._source.read(_CHUNK_BYTES)):
            start = chunk.lstrip(b"\0")
        if start:
            self._num_members += 1
            if self._num_members > MAX_SMALL_MEMBERS + self._num_bytes // MEMBER_BYTES:
                raise BrokenArchiveError("its gzip stream has too many members for so little content")
            self._member = zlib.decompressobj(_WINDOW)
        return start
