"""Server-sent events. No header leaves before every choice is admitted, so earlier errors are plain HTTP errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from lora_serve.server.context import CONTEXT
from lora_serve.server.errors import wire_error
from lora_serve.server.openai.answer import Admitted, Piece
from lora_serve.server.openai.generation import ChoiceEvents

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx must not collect the events
}
DONE = b"data: [DONE]\n\n"


class ChunkMaker(Protocol):
    """What an API makes of the choices' events."""

    def chunks(self, choice: int, event: Admitted | Piece) -> Iterator[dict[str, Any]]:
        """Zero or more chunks for one event."""

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks after every choice has ended."""


async def stream(request: web.Request, events: ChoiceEvents, maker: ChunkMaker, num_choices: int) -> web.StreamResponse:
    """Write the answer as it grows. A slow reader is waited for in `write`."""
    response = web.StreamResponse(headers=HEADERS)
    early: list[dict[str, Any]] = []  # chunks that came before the last choice was admitted
    waiting = num_choices
    try:
        async with aclosing(events):
            async for choice, event in events:
                made = maker.chunks(choice, event)
                if waiting == 0:
                    await _write(response, made)
                    continue
                early.extend(made)
                waiting -= isinstance(event, Admitted)
                if waiting == 0:
                    await response.prepare(request)
                    await _write(response, early)
        await _write(response, maker.last_chunks())
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if not response.prepared:
            raise
        await _write(response, [wire_error(error, request[CONTEXT].request_id).body()])
    await response.write(DONE)
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, chunks: Iterable[dict[str, Any]]) -> None:
    data = b"".join(b"data: " + _json(chunk) + b"\n\n" for chunk in chunks)
    if data:
        await response.write(data)


def _json(chunk: dict[str, Any]) -> bytes:
    return json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
