"""Tells a client that will say nothing more, and waits for its answer, from one that has gone.

Both look alike: the end of what they send (a FIN), from shutdown(SHUT_WR), as `nc -N` does it, or from close(). The
difference is that the machine of one that has gone answers whatever it is sent with a reset. So it is sent what every
client of HTTP/1.1 has to be able to skip, asked for or not: `100 Continue` (RFC 9110 15.2). A proxy that hands on
single ends of a connection needs two of them.

HTTP/1.0 has no such answers. A client of it that is silent is waited for a moment, and then counts as gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_LOOK = 0.05  # seconds: most answers are out by then, and nobody has to be asked
_LONGEST_PAUSE = 15.0
_BETWEEN_LOOKS = 0.5
PATIENCE = 2.0  # seconds for a client that cannot be asked


@dataclass(frozen=True, slots=True)
class Answering:
    """What a connection does for its silent client at one moment."""

    is_complete: bool  # the request is there to its end; else it never will be
    has_begun: bool  # bytes of its answer are out: none may come in between, and they tell as well as an interim answer
    may_be_asked: bool  # it understands interim answers


class HalfClosed:
    """Watches one connection whose client has ended its side, until it is closed."""

    def __init__(self, transport: asyncio.Transport, answering: Callable[[], Answering | None]) -> None:
        """`answering`: None if it is between two of the client's requests."""
        self._transport = transport
        self._answering = answering
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._asked_at = self._since
        self._num_looks_between = 0  # in a row, that found none of its requests being answered
        self._look_after = _FIRST_LOOK
        self._ask_after = 0.0
        self._timer = self._loop.call_later(_FIRST_LOOK, self._look)

    def stop(self) -> None:
        """The connection is closed."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if _is_reset(self._transport):
            self._transport.abort()
            return
        now, answering = self._loop.time(), self._answering()
        self._num_looks_between = 0 if answering is not None else self._num_looks_between + 1
        # From one request to the next it takes no two looks: the rest of a broken one is awaited, and never comes.
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
    """Nobody reads from the socket any more, so that nothing else would notice it before the next write."""
    error: int = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return error != 0
