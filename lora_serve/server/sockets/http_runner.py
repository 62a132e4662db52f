"""aiohttp's runner, whose server makes our connections."""

from __future__ import annotations

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from lora_serve.server.sockets.connections import HttpConnection


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
