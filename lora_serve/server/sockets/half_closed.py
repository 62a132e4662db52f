"""Tells a client that has ended its side of the connection and waits for its answer from one that has gone.

Both send a FIN: the one by shutdown(SHUT_WR), as `nc -N` does, the other by close(). But the machine of a client that
has gone answers any bytes with a reset. So the server sends `100 Continue`, which every HTTP/1.1 client must be able to
skip, asked for or not (RFC 9110 15.2). Behind a proxy that hands on one end of a connection at a time it takes two.

HTTP/1.0 has no such answers. Its silent clients are waited for a moment, and then count as gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_LOOK = 0.05  # seconds: most answers are out by then, and no client has to be asked
_LONGEST_PAUSE = 15.0
_BETWEEN_LOOKS = 0.5
PATIENCE = 2.0  # seconds for a client that cannot be asked


@dataclass(frozen=True, slots=True)
class Answering:
    """The state of the request that a connection serves for its silent client."""

    is_complete: bool  # the request came to its end; else it never will
    has_begun: bool  # bytes of the answer are out: they serve as well as an interim one, which may not come in between
    may_be_asked: bool  # the client understands interim answers


class HalfClosed:
    """Watches one connection whose client has ended its side, until it is closed."""

    def __init__(self, transport: asyncio.Transport, answering: Callable[[], Answering | None]) -> None:
        """`answering`: the state of the request; None between two requests of the client."""
        self._transport = transport
        self._answering = answering
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._asked_at = self._since
        self._num_looks_between = 0  # in a row that found no request
        self._look_after = _FIRST_LOOK
        self._ask_after = 0.0
        self._timer = self._loop.call_later(_FIRST_LOOK, self._look)

    def stop(self) -> None:
        """End the watch, as the connection is closed."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if _is_reset(self._transport):
            self._transport.abort()
            return
        now, answering = self._loop.time(), self._answering()
        self._num_looks_between = 0 if answering is not None else self._num_looks_between + 1
        # The next request is there before a second look. If not, the rest of a broken one is awaited and never comes.
        is_over = self._num_looks_between > 1 if answering is None else not self._goes_on(answering, now)
        if is_over:
            self._transport.close()
            return
        self._look_after = min(2 * self._look_after, _BETWEEN_LOOKS)
        self._timer = self._loop.call_later(self._look_after, self._look)

    def _goes_on(self, answering: Answering, now: float) -> bool:
        if not answering.is_complete:
            return False
        if answering.has_begun:
            return True
        if not answering.may_be_asked:
            return now - self._since < PATIENCE
        if now - self._asked_at >= self._ask_after:
            self._transport.write(_INTERIM)
            self._asked_at = now
            self._ask_after = min(2 * self._ask_after or _BETWEEN_LOOKS, _LONGEST_PAUSE)
        return True


def _is_reset(transport: asyncio.Transport) -> bool:
    """True if the client's machine sent a reset. Nobody reads from the socket, so only a write would notice it."""
    error: int = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return error != 0
