"""A request's body as a stream: counted, held against its digests and decoded while it comes.

aiohttp's own decoder is turned off (sockets/connections.py): it does not ask whether a gzip stream ever ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from lora_serve.adapters.http_content import CONTENT_DIGEST, Decoder, ExpectedDigests, decoder_for
from lora_serve.core.errors import InvalidRequestError

CHUNK_BYTES = 2**18
_CODED_BYTES = 2**16  # read at once of a coded body: gzip's members without content take the longest to decode
_MAX_LINE = 2**16
_MAX_LINES = 2**12  # the multipart reader takes preamble, boundaries and headers in lines, and no part's content


class BodyStream:
    """The stream that aiohttp's multipart reader asks for, over a body that aiohttp would not check."""

    def __init__(self, request: web.Request, on_bytes: Callable[[int], None]) -> None:
        """`on_bytes`: called with the number of bytes so far, as sent or decoded, whichever are more; may raise to
        break the reading off.

        Raises InvalidRequestError, UnsupportedMediaError for headers that cannot be understood.
        """
        self._source = request.content
        self._digests = _digests_of(request)
        self._decoder = decoder_of(request)
        self._chunk_bytes = _CODED_BYTES if "Content-Encoding" in request.headers else CHUNK_BYTES
        self._on_bytes = on_bytes
        self._num_sent = self._num_decoded = self._num_lines = 0
        self._pieces: Iterator[bytes] = iter(())
        self._buffer = bytearray()
        self._is_over = False

    async def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end. Raises InvalidRequestError if the body does not fit its digests."""
        if not self._buffer:
            await self._fill()
        return self._taken(size)

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """The bytes up to the next line feed, or to the end. Raises what `read` does, LineTooLong, and
        InvalidRequestError for more lines than the parts of any upload need.
        """
        self._num_lines += 1
        if self._num_lines > _MAX_LINES:
            raise InvalidRequestError(
                f"More than {_MAX_LINES} lines of the multipart body are outside its parts' content."
            )
        most, looked = max_line_length or _MAX_LINE, 0
        while (at := self._buffer.find(b"\n", looked)) < 0 and not self._is_over and len(self._buffer) <= most:
            looked = len(self._buffer)
            await self._fill()
        size = at + 1 if at >= 0 else len(self._buffer)
        if size > most:
            raise LineTooLong(bytes(self._buffer[:100]), most)
        return self._taken(size)

    def unread_data(self, data: bytes) -> None:
        """Put `data` back, to come again at the next read."""
        self._buffer[:0] = data

    def at_eof(self) -> bool:
        """True if the end was met, and nothing is left before it."""
        return self._is_over and not self._buffer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of the body, piece by piece."""
        while chunk := await self.read(CHUNK_BYTES):
            yield chunk

    def _taken(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def _fill(self) -> None:
        """Add the next piece; at the body's end, hold all of it against its digests and checksum."""
        piece = self._next_piece()
        if piece:
            await asyncio.sleep(0)  # few bytes may decode to many pieces, and nothing was waited for
        while not piece and not self._is_over:
            chunk = await self._source.read(self._chunk_bytes)
            self._is_over = not chunk
            self._num_sent += len(chunk)
            self._digests.update(chunk)
            self._pieces = self._decoder.decode(chunk) if chunk else iter(())
            piece = self._next_piece()
            if not piece and not self._is_over:
                await asyncio.sleep(0)  # the next chunk may be here already, and be as empty
        self._buffer += piece
        if self._is_over:
            self._digests.check()
            self._decoder.finish()

    def _next_piece(self) -> bytes:
        piece = next(self._pieces, b"")
        self._num_decoded += len(piece)
        self._on_bytes(max(self._num_sent, self._num_decoded))
        return piece


def decoder_of(request: web.Request) -> Decoder:
    """The decoder for the request's Content-Encoding. Raises UnsupportedMediaError."""
    return decoder_for(", ".join(request.headers.getall("Content-Encoding", [])), "The request body")


def _digests_of(request: web.Request) -> ExpectedDigests:
    fields = request.headers.getall(CONTENT_DIGEST, [])
    return ExpectedDigests(", ".join(fields) if fields else None)
