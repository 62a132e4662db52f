"""How the headers of a request say that its body is coded, and what it hashes to.

aiohttp's own decoder is turned off (http_runner.py): it does not ask whether a gzip stream ever ended.
"""

from __future__ import annotations

from aiohttp import web

from lora_serve.adapters.http_content import CONTENT_DIGEST, Decoder, ExpectedDigests, decoder_for


def decoder_of(request: web.Request) -> Decoder:
    """Raises UnsupportedMediaError."""
    return decoder_for(", ".join(request.headers.getall("Content-Encoding", [])), "The request body")


def digests_of(request: web.Request) -> ExpectedDigests:
    """Those that the request brings, of its body as it is sent. Raises InvalidRequestError."""
    fields = request.headers.getall(CONTENT_DIGEST, [])
    return ExpectedDigests(", ".join(fields) if fields else None)
