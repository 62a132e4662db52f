"""aiohttp's runner and the connections that its server makes.

Clients may end their side first. Broken HTTP is refused in few words: aiohttp's own refusal names its versions, repeats
the bytes and logs them with a traceback, so that any client could fill the log, with prompts and keys in it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import EMPTY_PAYLOAD, HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from aiohttp.web_request import BaseRequest

from lora_serve.server.answers import WireError
from lora_serve.server.context import secure
from lora_serve.server.sockets.listener import is_clients_fault, log_clients_fault

_INTERIM_ANSWER = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_LOOK = 0.05  # seconds: most answers are out by then, and no client has to be asked
_LONGEST_PAUSE = 15.0
_BETWEEN_LOOKS = 0.5
PATIENCE = 2.0  # seconds for a client that cannot be asked
READ_BYTES = 2**14  # of a connection, at once; an upload of 400 MiB costs the loop 0.95 s with it, 0.6 s with 2**15
# A request's first line with more than one blank between its parts, which the parser takes for one.
_WITH_BLANKS = re.compile(rb"^[A-Z]+(?:  +[^ \r\n]+ +| [^ \r\n]+  +)HTTP/", re.MULTILINE)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answering:
    """The state of the request that a connection serves for its silent client."""

    is_complete: bool  # the request came to its end; else it never will
    has_begun: bool  # bytes of the answer are out: they serve as well as an interim one, which may not come in between
    may_be_asked: bool  # the client understands interim answers


class HalfClosed:
    """Tells a client that has ended its side of the connection and waits for its answer from one that has gone.

    Both send a FIN: the one by shutdown(SHUT_WR), as `nc -N` does, the other by close(). But the machine of a client
    that has gone answers any bytes with a reset. So the server sends `100 Continue`, which every HTTP/1.1 client must
    be able to skip, asked for or not (RFC 9110 15.2). Behind a proxy that hands on one end of a connection at a time it
    takes two. HTTP/1.0 has no such answers. Its silent clients are waited for a moment, and then count as gone.
    """

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
            self._transport.write(_INTERIM_ANSWER)
            self._asked_at = now
            self._ask_after = min(2 * self._ask_after or _BETWEEN_LOOKS, _LONGEST_PAUSE)
        return True


def _is_reset(transport: asyncio.Transport) -> bool:
    """True if the client's machine sent a reset. The socket is not read, so only a write would notice it."""
    error: int = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return error != 0


_NOTHING = Answering(is_complete=False, has_begun=False, may_be_asked=False)  # no request is there, and none will be


class HttpRunner(web.AppRunner):
    """Serves an application over TCP. A client that leaves cancels its handler, which frees its row."""

    def __init__(self, app: web.Application, shutdown_timeout: float, root_path: str = "") -> None:
        """`shutdown_timeout`: seconds for open connections after the sites have stopped. `root_path`: see the flag."""
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
        self._root_path = root_path

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        # The application keeps how it makes its server to itself; its attributes are the base class's.
        made.__class__ = _HttpServer
        made.root_path = self._root_path  # type: ignore[attr-defined]
        return made


class _HttpServer(web.Server):
    def __call__(self) -> RequestHandler:
        return HttpConnection(self, loop=self._loop, **self._kwargs)


class HttpConnection(RequestHandler):
    """aiohttp's connection, except for broken HTTP, bodies (which stay coded) and clients that end their side."""

    __slots__ = ("_body", "_half_closed", "_line", "_root_path")

    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(server, auto_decompress=False, **options)  # json_body.py decodes, and checks
        self._root_path: str = getattr(server, "root_path", "")  # aiohttp's own servers have none
        self._body: StreamReader = EMPTY_PAYLOAD  # of the last request that was read
        self._line = b""  # the beginning of a request of which no more has come
        self._half_closed: HalfClosed | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read less at once than asyncio does: all that was read is parsed in one go, and may be many tiny chunks."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES  # asyncio's own: 256 KiB

    def data_received(self, data: bytes) -> None:
        """Refuse what aiohttp's parser is lenient about, so that a proxy in front of it reads nothing else in it."""
        num_known, line = len(self._messages), self._line + data if self._body.is_eof() else b""
        is_broken = _WITH_BLANKS.match(line.lstrip(b"\r\n")) is not None
        super().data_received(b"\0\r\n\r\n" if is_broken else data)
        new = range(num_known, len(self._messages))
        is_odd = len(new) > 1 and _WITH_BLANKS.search(data, data.find(b"\n")) is not None
        for index in new:
            message, self._body = self._messages[index]
            if isinstance(message, RawRequestMessage):
                self._messages[index] = self._checked(message, self._body, is_odd and index > num_known)
        rest = data.rpartition(b"\r\n\r\n")[2] if self._body is EMPTY_PAYLOAD else b""  # behind the last head
        self._line = rest if new else line[:READ_BYTES]

    def _checked(self, message: RawRequestMessage, body: StreamReader, is_odd: bool) -> tuple[Any, StreamReader]:
        """The request, without the prefix of its path; an error in its place if it is not as HTTP has to be."""
        coding = message.headers.get(hdrs.TRANSFER_ENCODING, "chunked").lower()
        if is_odd or message.version not in (HttpVersion10, HttpVersion11) or coding != "chunked":
            error = BadHttpMessage("another version, another coding, or blanks")
            return _ErrInfo(status=400, exc=error, message=error.message), EMPTY_PAYLOAD
        path = message.url.raw_path
        if self._root_path and f"{path}/".startswith(f"{self._root_path}/"):
            url = message.url.with_path(path.removeprefix(self._root_path) or "/", encoded=True, keep_query=True)
            message = message._replace(path=url.raw_path_qs, url=url)
        return message, body

    def eof_received(self) -> bool | None:  # type: ignore[override] # which has nothing to return
        """The client sends no more. Returns whether the connection stays open for answers; with TLS it never does."""
        answering = self._answering()
        if self.transport is None or self.ssl_context or (answering and not answering.is_complete):
            return None
        if self._half_closed is None:
            self._half_closed = HalfClosed(self.transport, self._answering)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is closed, by either side."""
        if self._half_closed is not None:
            self._half_closed.stop()
        super().connection_lost(exc)

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """The handler has answered. A connection whose client sends no more is closed after the last answer."""
        self._end_after(resp)
        finished = await super().finish_response(request, resp, start_time)
        self._end_after(resp)  # the client may have ended its side meanwhile
        return finished

    def _end_after(self, response: web.StreamResponse) -> None:
        if self._half_closed is not None and not self._messages:
            response.force_close()

    def _answering(self) -> Answering | None:
        request = self._current_request
        if request is None:
            is_idle = self._waiter is not None and not self._waiter.done()
            return _NOTHING if is_idle else None
        return Answering(
            is_complete=request.content.is_eof(),
            has_begun=request.writer.output_size > 0,
            may_be_asked=request.version >= HttpVersion11,
        )

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """aiohttp reads on after the answer, and logs a client's fault of that time as an error of the server."""
        if is_clients_fault(error := kw.get("exc_info")):
            log_clients_fault(error)
        else:
            super().log_exception(*args, **kw)

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that does not get as far as a handler."""
        if status >= 500 or request.writer.output_size > 0:
            answer = super().handle_error(request, status, exc, None)  # with its traceback: an error of ours
        else:
            _log.info("broken HTTP from %s: %s", request.remote, type(exc).__name__)
            words = "This is not HTTP/1.1 as it has to be."
            if isinstance(exc, LineTooLong):
                words = "A line of the request's head is too long (--max-header-size)."
            answer = WireError(status, words, "invalid_request_error", code="bad_http").response()
            answer.force_close()
        secure(answer.headers)
        return answer
