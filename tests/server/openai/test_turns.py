"""A stream of many rows, and a client that takes all at once, leave others their turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from lora_serve.core.messages import PromptEvent, Timings
from lora_serve.server.answers import SEND_BYTES
from lora_serve.server.openai.answering import YIELD_BYTES, _stream, _write, _Yielding
from lora_serve.text.output import Piece


class Taken(web.StreamResponse):
    """A response whose client takes everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))


@asynccontextmanager
async def others() -> AsyncIterator[list[None]]:
    """Somebody else on the event loop; the list grows by one with each of their turns."""
    turns = list[None]()

    async def work() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    task = asyncio.create_task(work())
    yield turns
    task.cancel()


async def test_much_data_is_sent_in_pieces_with_turns_between() -> None:
    response, data = Taken(), bytes(range(256)) * (3 * SEND_BYTES // 256 + 1)
    async with others() as turns:
        await _write(response, data)
        assert b"".join(response.sent) == data
        assert [len(piece) for piece in response.sent] == [SEND_BYTES] * 3 + [256]
        assert len(turns) == 3


async def test_nothing_is_sent_of_no_data() -> None:
    response = Taken()
    await _write(response, b"")
    assert response.sent == []


async def test_events_of_many_rows_leave_others_their_turns() -> None:
    row = _Yielding()
    async with others() as turns:
        for _ in range(32):
            await row.took(YIELD_BYTES // 4)
        assert 8 <= len(turns) <= 16
        before = len(turns)
        for _ in range(32):
            await row.took(0)  # a send each
        assert 1 <= len(turns) - before <= 4


class ManyRows:
    """A body whose events are as long as they say, of rows that were all computed in one step."""

    ending = b"end"

    def chunks(self, number: int, event: PromptEvent | Piece) -> Iterator[bytes]:
        yield b"p" * (YIELD_BYTES // 4) if isinstance(event, PromptEvent) else event.text.encode()

    def sse(self, chunk: bytes) -> bytes:
        return chunk

    def last_chunks(self) -> Iterator[bytes]:
        return iter(())


async def test_a_stream_of_many_rows_leaves_others_their_turns() -> None:
    prompts = [(row, PromptEvent(str(row), Timings(0.0, 0.0, 0.0), None)) for row in range(32)]
    pieces = [(row, Piece("t")) for row in range(32)]
    taken = list[int]()

    async def events() -> AsyncGenerator[Any, None]:
        async with others() as turns:
            for event in (*prompts, *pieces):  # without ever waiting
                yield event
            taken.append(len(turns))

    async def handler(request: web.Request) -> web.StreamResponse:
        rows = SimpleNamespace(requests=prompts, is_shown=False)
        return await _stream(request, events(), cast(Any, ManyRows()), cast(Any, rows))

    app = web.Application()
    app.router.add_get("/", handler)
    async with TestClient(TestServer(app)) as client:
        body = await (await client.get("/")).read()
    assert body == b"p" * (YIELD_BYTES // 4) * 32 + b"t" * 32 + b"end"
    assert taken[0] >= 8 + 8 + 1  # encoding prompts, sending them, and the pieces
