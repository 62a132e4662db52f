"""Errors that clients cause and no operator has to look into: a line of log, and no traceback."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lora_serve.server.sockets.listener import SHORT

_log = logging.getLogger(__name__)
# A body cut short or badly encoded; broken HTTP; a connection that is gone (TLS included).
_CLIENTS = (web.RequestPayloadError, HttpProcessingError, ConnectionError, asyncio.IncompleteReadError, TimeoutError)


def is_clients_fault(error: object) -> bool:
    """True if a client alone is the cause."""
    return isinstance(error, _CLIENTS)


def log_clients_fault(error: object) -> None:
    """Log the error's class only: its text may quote what was sent."""
    _log.info("a request could not be read to its end: %s", type(error).__name__)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The event loop's exception handler."""
    error = context.get("exception")
    if is_clients_fault(error):
        log_clients_fault(error)
    elif isinstance(error, OSError) and error.errno in SHORT and "accept" in str(context.get("message")):
        _log.warning("newcomers have to wait: %s (ulimit -n)", error.strerror)
    else:
        loop.default_exception_handler(context)
