"""A body as a stream: whatever it decodes to, everybody else has their turns meanwhile."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.json_body import BodyStream

MEBIBYTES = 8


def request_of(sent: bytes) -> web.Request:
    """A request whose gzip body has come already, as these bytes."""
    loop = asyncio.get_running_loop()
    content = StreamReader(BaseProtocol(loop), len(sent), loop=loop)
    content.feed_data(sent)
    content.feed_eof()
    return make_mocked_request("PUT", "/", headers={"Content-Encoding": "gzip"}, payload=content)


@contextmanager
def counted_turns() -> Iterator[count[int]]:
    """Another task counts its turns, until the block ends."""
    turns = count()

    async def take_turns() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    yield turns
    others.cancel()


async def test_few_bytes_that_decode_to_many_do_not_hold_the_event_loop() -> None:
    with counted_turns() as turns:
        body = BodyStream(request_of(gzip.compress(bytes(MEBIBYTES * 2**20))), lambda num_bytes: None)
        assert sum([len(piece) async for piece in body.chunks()]) == MEBIBYTES * 2**20
        assert next(turns) >= MEBIBYTES - 1


async def test_others_have_their_turns_while_members_without_content_are_decoded() -> None:
    empty = gzip.compress(b"", mtime=0)
    with counted_turns() as turns:
        body = BodyStream(request_of(empty * (2**20 // len(empty))), lambda num_bytes: None)
        assert [piece async for piece in body.chunks()] == []
        assert next(turns) > 10  # of some milliseconds each


async def test_lines_without_end_are_refused() -> None:
    body = BodyStream(request_of(gzip.compress(b"\n" * 2**16)), lambda num_bytes: None)

    async def read_all() -> None:
        while await body.readline():
            pass

    with pytest.raises(InvalidRequestError, match="lines"):
        await read_all()
