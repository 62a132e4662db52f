"""Contents under a Content-Encoding, decoded to their own ends, where their checksums stand, whoever receives them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from lora_serve.core.errors import InvalidRequestError, UnsupportedMediaError

PIECE_BYTES = 2**20  # that a decoder gives at once
_WINDOWS: Mapping[str, int] = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # RFC 1952, 1950; headless has no checksum


class Decoder(Protocol):
    """Undoes a Content-Encoding."""

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """The content's next pieces, none larger than PIECE_BYTES or the chunk. Raises InvalidRequestError."""

    def finish(self) -> None:
        """Called at the content's end. Raises InvalidRequestError if the stream has not come to its own."""


def decoder_for(header: str, what: str) -> Decoder:
    """`header`: the Content-Encoding; `what`: the content in words. Raises UnsupportedMediaError."""
    coding = header.strip().lower()
    if coding in _WINDOWS:
        return _Inflating(coding, what)
    if coding not in ("", "identity"):
        raise UnsupportedMediaError(f"{what}'s Content-Encoding must be gzip, deflate or none.")
    return _Identity()


class _Identity:
    def decode(self, chunk: bytes) -> Iterator[bytes]:
        yield chunk

    def finish(self) -> None:
        pass


class _Inflating:
    """gzip, whose members may follow one another, or deflate in its zlib form."""

    def __init__(self, coding: str, what: str) -> None:
        self._coding, self._what = coding, what
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
        if self._coding == "deflate":
            raise self._damaged("something stands behind its end")
        self._stream = zlib.decompressobj(_WINDOWS[self._coding])

    def _damaged(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._what} is no sound {self._coding} stream: {reason}.")
