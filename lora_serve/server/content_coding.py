"""Request bodies under a Content-Encoding, decoded to their own ends, where their checksums stand.

aiohttp's own decoder is turned off (http_runner.py): it does not ask whether a gzip stream ever ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from aiohttp import web

from lora_serve.adapters.content_digest import CONTENT_DIGEST, ExpectedDigests
from lora_serve.core.errors import InvalidRequestError, UnsupportedMediaError

PIECE_BYTES = 2**20  # that a decoder gives at once
_WINDOWS: Mapping[str, int] = {"gzip": 31, "deflate": 15}  # RFC 1952 and 1950; what is headless has no checksum


class Decoder(Protocol):
    """Undoes a Content-Encoding."""

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """The content's next pieces, none larger than PIECE_BYTES or the chunk. Raises InvalidRequestError."""

    def finish(self) -> None:
        """Called at the body's end. Raises InvalidRequestError if the stream has not come to its own."""


def decoder_of(request: web.Request) -> Decoder:
    """Raises UnsupportedMediaError."""
    coding = request.headers.get("Content-Encoding", "").strip().lower()
    if coding in _WINDOWS:
        return _Inflating(coding)
    if coding not in ("", "identity"):
        raise UnsupportedMediaError("The request body's Content-Encoding must be gzip, deflate or none.")
    return _Identity()


def digests_of(request: web.Request) -> ExpectedDigests:
    """Those that the request brings, of its body as it is sent. Raises InvalidRequestError."""
    fields = request.headers.getall(CONTENT_DIGEST, [])
    return ExpectedDigests(", ".join(fields) if fields else None)


class _Identity:
    def decode(self, chunk: bytes) -> Iterator[bytes]:
        yield chunk

    def finish(self) -> None:
        pass


class _Inflating:
    """gzip, whose members may follow one another, or deflate in its zlib form."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream = zlib.decompressobj(_WINDOWS[coding])

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        while chunk:
            if self._stream.eof:
                self._begin_another()
            while piece := self._inflated(chunk):
                chunk = self._stream.unconsumed_tail
                yield piece
            chunk = self._stream.unused_data

    def finish(self) -> None:
        if not self._stream.eof:
            raise self._damaged("it is cut short")

    def _inflated(self, chunk: bytes) -> bytes:
        try:
            return self._stream.decompress(chunk, PIECE_BYTES)
        except zlib.error as error:
            raise self._damaged(str(error)) from None

    def _begin_another(self) -> None:
        if self._coding != "gzip":
            raise self._damaged("something stands behind its end")
        self._stream = zlib.decompressobj(_WINDOWS[self._coding])

    def _damaged(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"The request body is no sound {self._coding} stream: {reason}.")
