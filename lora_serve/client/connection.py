"""One end of a stream socket as frames (`wire.py`), on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from lora_serve.client.wire import FrameSplitter, head_of


class Connection(asyncio.Protocol):
    """Hands on every frame that is complete. Bytes that are no frames end the connection."""

    def __init__(self, receive: Callable[[bytes], None] = lambda frame: None) -> None:
        self.receive = receive
        self.resumed: Callable[[], None] = lambda: None  # called when there is room again
        self.closed = asyncio.Event()
        self._frames = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self.receive(frame)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._has_room.set()

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()
        self.resumed()

    @property
    def has_room(self) -> bool:
        """False while the other end does not read."""
        return self._has_room.is_set()

    async def room(self) -> None:
        """Returns when the other end has read most of what was sent, or the connection is closed."""
        await self._has_room.wait()

    def send(self, body: bytes) -> None:
        """Send a frame; after the end it is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(head_of(body) + body)

    def close(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()
