"""A body as a stream: whatever it decodes to, everybody else has their turns meanwhile."""

from __future__ import annotations

import asyncio
import gzip
from itertools import count
from unittest.mock import Mock

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.bodies.body_stream import BodyStream

MEBIBYTES = 8


def request_of(body: bytes) -> web.Request:
    """A request whose gzip body has come already."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.transport = Mock()
    content = StreamReader(protocol, 2**16, loop=loop)
    content.feed_data(gzip.compress(body))
    content.feed_eof()
    return make_mocked_request("PUT", "/", headers={"Content-Encoding": "gzip"}, payload=content)


async def test_few_bytes_that_decode_to_many_do_not_hold_the_event_loop() -> None:
    turns = count()

    async def take_turns() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    body = BodyStream(request_of(bytes(MEBIBYTES * 2**20)), lambda num_bytes: None)
    assert sum([len(piece) async for piece in body.chunks()]) == MEBIBYTES * 2**20
    assert next(turns) >= MEBIBYTES - 1
    others.cancel()


async def test_lines_without_end_are_refused() -> None:
    body = BodyStream(request_of(b"\n" * 2**16), lambda num_bytes: None)

    async def read_all() -> None:
        while await body.readline():
            pass

    with pytest.raises(InvalidRequestError, match="lines"):
        await read_all()
