"""The bytes of a body, and the value in them, without holding up the event loop however large they are."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from lora_serve.server.bodies.body_stream import BodyStream
from lora_serve.server.bodies.json_parsing import parse_json
from lora_serve.server.bodies.json_scan import SLICE
from lora_serve.server.bodies.sliced_json import SlicedObject
from lora_serve.server.schemas.known import TOKEN_ID_NAMES, known_names
from lora_serve.server.services import SERVICES


async def read_bytes(request: web.Request, max_bytes: int) -> bytes:
    """All of the body, decoded and held against its checksums. Raises HTTPRequestEntityTooLarge, InvalidRequestError.

    aiohttp's own `read` goes on for as long as there are bytes, without a turn for others.
    """
    pieces, num_bytes = list[bytes](), 0

    def count(num: int) -> None:
        nonlocal num_bytes
        num_bytes += num
        if num_bytes > max_bytes:
            raise web.HTTPRequestEntityTooLarge(max_bytes, num_bytes)

    async for piece in BodyStream(request, count).chunks():
        pieces.append(piece)
        await asyncio.sleep(0)  # the others' turn
    return b"".join(pieces)


async def parse_body(request: web.Request, raw: bytes) -> Any:
    """Of a large body only fields that some route reads, and on a thread. Raises InvalidRequestError."""
    if len(raw) <= SLICE:
        return parse_json(raw)
    reader = SlicedObject(raw, known_names(), TOKEN_ID_NAMES)
    async with request.app[SERVICES].large_bodies:
        try:
            return await asyncio.to_thread(reader.read)
        finally:
            reader.stop()
