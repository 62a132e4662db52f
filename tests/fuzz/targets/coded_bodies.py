"""A body under Content-Encoding, with a Content-Digest: what is taken is what Python's own readers make of it."""

from __future__ import annotations

import gzip
import hashlib
import random
import zlib
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import patch

from lora_serve.adapters import http_content
from lora_serve.adapters.http_content import ExpectedDigests, content_digest, decoder_for
from lora_serve.core.errors import InvalidRequestError, UnsupportedMediaError
from tests.fuzz.mutating import Bytes

ERRORS = (InvalidRequestError, UnsupportedMediaError)
MOST = 2**21  # bytes that are unpacked: the caller's own limit
PIECE_BYTES = 2**10  # so that small bodies have several
TEXT = b'{"prompt": "a"}'


def fuzz(data: bytes) -> None:
    """A line for each header, with a step in which the body comes; then the body."""
    with patch.object(http_content, "PIECE_BYTES", PIECE_BYTES):
        _fuzz(data)


def _fuzz(data: bytes) -> None:
    step, coding, digest, body = (*data.split(b"\n", 3), b"", b"", b"")[:4]
    size = 1 + sum(step)
    expected = ExpectedDigests(digest.decode("latin-1") or None)
    decoder = decoder_for(coding.decode("latin-1"), "The body")
    content = bytearray()
    for at in range(0, len(body), size):
        chunk = body[at : at + size]
        expected.update(chunk)
        for piece in decoder.decode(chunk):
            content += piece
            if len(content) > MOST:
                with suppress(EOFError, OSError, zlib.error):  # of a body that is damaged further on
                    assert len(_plain(coding, body)) > MOST
                return
    expected.check()
    decoder.finish()
    assert content == _plain(coding, body)


def _plain(coding: bytes, body: bytes) -> bytes:
    match coding.decode("latin-1").strip().lower():
        case "gzip" | "x-gzip":
            return gzip.decompress(body)
        case "deflate":
            return zlib.decompress(body)
        case _:
            return body


def seeds() -> Iterator[bytes]:
    text, zeros = gzip.compress(TEXT, mtime=0), gzip.compress(bytes(9000), mtime=0)
    for body in (text, text * 2, zeros, zeros * 2):
        yield b"\xff\ngzip\n\n" + body
        yield b"\x02\nGZIP \n" + content_digest(hashlib.sha256(body)).encode() + b"\n" + body
    yield b"\x01\ndeflate\n\n" + zlib.compress(TEXT)
    yield b"\x01\n\nsha-256=:AAAA:, md5=:AA==:;a=1\n" + TEXT
    yield b"\x01\nbr\n\n" + TEXT
    yield b"\x09\nidentity\nsha-512=:" + b"A" * 86 + b"==:\n" + TEXT


def mutate(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    """Headers, or the plain text beneath the coding, or any byte."""
    rng, parts = random.Random(seed), data.split(b"\n", 3)
    if len(parts) < 4 or rng.random() < 0.3:
        return mutate_bytes(data, max_bytes)
    which = rng.randrange(5)
    if which < 3:
        parts[which] = mutate_bytes(parts[which], 200).replace(b"\n", b"")
    elif which == 3:
        parts[1] = rng.choice((b"gzip", b"deflate", b"x-gzip", b"", b"identity", b"gzip, gzip"))
    else:
        text = mutate_bytes(TEXT * rng.choice((1, 9)), 300)
        code = zlib.compress if parts[1] == b"deflate" else lambda plain: gzip.compress(plain, mtime=0)
        parts[3] = code(text) + rng.choice((b"", b"", code(b"x"), b"\0"))
        parts[2] = rng.choice((b"", content_digest(hashlib.sha256(parts[3])).encode()))
    return b"\n".join(parts)[:max_bytes]
