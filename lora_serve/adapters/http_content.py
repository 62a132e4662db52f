"""Content-Encoding (gzip, deflate) and Content-Digest (RFC 9530) of HTTP bodies.

The web uses this for requests, the sources for answers. A stream is decoded to its own end, where its checksum stands.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import http_sf

from lora_serve.core.errors import InvalidRequestError, UnsupportedMediaError

CONTENT_DIGEST = "Content-Digest"
PIECE_BYTES = 2**20  # the most that a decoder yields at once
_FIRST_BYTES = 2**11  # of a chunk, for a member behind another
_WINDOWS: Mapping[str, int] = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # RFC 1952, 1950; raw deflate has no checksum
_ALGORITHMS = {"sha-256": "sha256", "sha-512": "sha512"}  # the registry's active ones; others are ignored


class Decoder(Protocol):
    """Undoes a Content-Encoding."""

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """The content's next pieces, none larger than PIECE_BYTES or the chunk. Raises InvalidRequestError."""

    def finish(self) -> None:
        """Called when the body has ended. Raises InvalidRequestError if the compressed stream has not."""


def decoder_for(header: str, what: str) -> Decoder:
    """`header`: the Content-Encoding; `what`: names the content in errors. Raises UnsupportedMediaError."""
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
        self._next_bytes = PIECE_BYTES

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(chunk):
            if self._stream.eof:
                self._begin_another()
            part = chunk[at : at + self._next_bytes]
            self._next_bytes = min(2 * self._next_bytes, PIECE_BYTES)
            at += len(part)
            while piece := self._inflated(part):
                yield piece
                if self._stream.eof:
                    break  # the tail holds what stands behind the end, as does `unused_data`
                part = self._stream.unconsumed_tail
            at -= len(self._stream.unused_data)

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
        self._next_bytes = _FIRST_BYTES  # at its end the stream copies what it was given too much

    def _damaged(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._what} is no sound {self._coding} stream: {reason}.")


class ExpectedDigests:
    """The digests that a header promises: `update` takes every piece of the content, `check` compares."""

    def __init__(self, header: str | None) -> None:
        """`header` None: nothing is expected. Raises InvalidRequestError if it cannot be read."""
        self._expected = {} if header is None else _parsed(header)
        self._found = {name: hashlib.new(_ALGORITHMS[name]) for name in self._expected}

    def update(self, chunk: bytes) -> None:
        for content in self._found.values():
            content.update(chunk)

    def check(self) -> None:
        """Raises InvalidRequestError unless the content has every promised digest."""
        for name, digest in self._expected.items():
            if not hmac.compare_digest(self._found[name].digest(), digest):
                raise InvalidRequestError(
                    f"The content is not what its {CONTENT_DIGEST} says ({name}): it was changed on its way."
                )


def content_digest(content: Any) -> str:
    """The header's value for a content that `hashlib.sha256` has hashed."""
    return http_sf.ser({"sha-256": content.digest()})


def _parsed(header: str) -> dict[str, bytes]:
    try:
        table = cast("dict[str, Any]", http_sf.parse(header.encode("latin-1"), tltype="dictionary"))
    except (ValueError, UnicodeEncodeError):
        raise _unreadable("it is no dictionary of digests") from None
    found = {}
    for name, member in table.items():
        value = member[0] if isinstance(member, tuple) else member
        if name not in _ALGORITHMS:
            continue
        if not isinstance(value, bytes) or len(value) != hashlib.new(_ALGORITHMS[name]).digest_size:
            raise _unreadable(f"{name} is no digest of its length between two colons")
        found[name] = value
    return found


def _unreadable(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The header {CONTENT_DIGEST} cannot be read: {reason} (RFC 9530).")
