"""Bodies are decoded while they come, and the event loop serves others meanwhile."""

from __future__ import annotations

import asyncio
import gzip

from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from lora_serve.server.bodies.body_stream import BodyStream


def received(content: bytes) -> StreamReader:
    """A body that has come as a whole."""
    loop = asyncio.get_running_loop()
    stream = StreamReader(BaseProtocol(loop), len(content), loop=loop)
    stream.feed_data(content)
    stream.feed_eof()
    return stream


async def test_others_have_their_turns_while_members_without_content_are_decoded() -> None:
    empty = gzip.compress(b"", mtime=0)
    body = received(empty * (2**20 // len(empty)))
    request = make_mocked_request("POST", "/", headers={"Content-Encoding": "gzip"}, payload=body)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(count_turns())
    assert [piece async for piece in BodyStream(request, lambda _: None).chunks()] == []
    others.cancel()
    assert turns > 10  # of some milliseconds each
