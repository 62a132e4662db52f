"""A stream of many rows, and a client that takes all at once, leave others their turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from lora_serve.server.openai.answering import PIECE, TURN, _Turns, _write


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
    response, data = Taken(), bytes(range(256)) * (3 * PIECE // 256 + 1)
    async with others() as turns:
        await _write(response, data)
        assert b"".join(response.sent) == data
        assert [len(piece) for piece in response.sent] == [PIECE] * 3 + [256]
        assert len(turns) == 3


async def test_nothing_is_sent_of_no_data() -> None:
    response = Taken()
    await _write(response, b"")
    assert response.sent == []


async def test_events_of_many_rows_leave_others_their_turns() -> None:
    row = _Turns()
    async with others() as turns:
        for _ in range(32):
            await row.took(TURN // 4)
        assert 8 <= len(turns) <= 16
        before = len(turns)
        for _ in range(32):
            await row.took(0)  # a send each
        assert 1 <= len(turns) - before <= 4
