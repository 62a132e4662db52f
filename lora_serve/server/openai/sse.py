"""Server-sent events. No header leaves before every choice is admitted, so earlier errors are plain HTTP errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from lora_serve.server.answers.beside import LONG
from lora_serve.server.answers.errors import wire_error
from lora_serve.server.answers.json_answer import written
from lora_serve.server.context import CONTEXT
from lora_serve.server.openai.answer import Admitted, Piece
from lora_serve.server.openai.generation import ChoiceEvents
from lora_serve.server.openai.logprobs import num_values

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
    early: list[bytes] = []  # chunks that came before the last choice was admitted
    waiting = num_choices
    try:
        async with aclosing(events):
            async for choice, event in events:
                data = await _made(maker, choice, event)
                if waiting == 0:
                    await _write(response, data)
                    continue
                early.append(data)
                waiting -= isinstance(event, Admitted)
                if waiting == 0:
                    await response.prepare(request)
                    for data in early:
                        await _write(response, data)
        await _write(response, _data(maker.last_chunks()))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if not response.prepared:
            raise
        await _write(response, _data([wire_error(error, request[CONTEXT].request_id).body()]))
    await response.write(DONE)
    await response.write_eof()
    return response


async def _made(maker: ChunkMaker, choice: int, event: Admitted | Piece) -> bytes:
    """The chunks of an event; of a prompt with log-probabilities (`echo`) they may be large."""
    entries = event.prompt_logprobs if isinstance(event, Admitted) else None
    if num_values(entries) <= LONG:
        return _data(maker.chunks(choice, event))
    return await asyncio.to_thread(
        lambda: b"".join(b"data: " + _in_slices(chunk) + b"\n\n" for chunk in maker.chunks(choice, event))
    )


async def _write(response: web.StreamResponse, data: bytes) -> None:
    if data:
        await response.write(data)


def _data(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + _encode(chunk).encode() + b"\n\n" for chunk in chunks)


def _encode(chunk: Any) -> str:
    return json.dumps(chunk, ensure_ascii=False, separators=(",", ":"), default=list)


def _in_slices(chunk: dict[str, Any]) -> bytes:
    return "".join(written(chunk, _encode)).encode()
