"""The listening socket: takes few newcomers at a time, and no more once descriptors are short.

asyncio takes as many in one go as may wait. Each is open before anybody can count it, so a burst could take all the
descriptors of the process; without any left asyncio would go on to ask, and to log it, a thousand times a second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import ConfigError
from lora_serve.tenancy.authenticator import auth_required, is_loopback

MAX_BURST = 64  # connections between two turns of the event loop; well below connections.RESERVED_DESCRIPTORS
logger = logging.getLogger(__name__)
SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener(socket.socket):
    """A socket for `create_server`. The first failure of a round reaches asyncio, which then pauses for a second."""

    _num_left = MAX_BURST

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError, which ends asyncio's round, also when the round's share is used up."""
        if self._num_left == MAX_BURST:
            asyncio.get_running_loop().call_soon(self._begin_round)
        if self._num_left <= 0:
            raise BlockingIOError(errno.EAGAIN, "the next round")
        self._num_left -= 1
        try:
            return super().accept()
        except OSError as error:
            if error.errno in SHORT:
                self._num_left = 0
            raise

    def _begin_round(self) -> None:
        self._num_left = MAX_BURST


def bound_socket(host: str, port: int) -> socket.socket:
    """Binds the port, before the model is loaded; connections are accepted once the site starts to listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = Listener(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded as a host name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {reason}") from error
    return listener


def check_exposure(config: ServerConfig, listener: socket.socket) -> None:
    """Raise ConfigError if others could use the models without a key and nobody said `--auth off`.

    `--auth auto` judges by the name in --host, and `localhost` may be any address that a hosts file says: what counts
    is where the socket is bound.
    """
    address = str(listener.getsockname()[0])
    if is_loopback(address) or auth_required(config.auth_mode, config.host) or config.auth_mode == "off":
        return
    raise ConfigError(
        f"--host: {config.host} is {address}, which other machines can reach, and no key would be asked for: "
        "give --auth on, or --auth off if anybody may use the models"
    )


def warn_of_exposure(config: ServerConfig, listener: socket.socket) -> None:
    """Log what others on the network may do, or read."""
    address = str(listener.getsockname()[0])
    if is_loopback(address):
        return
    if not auth_required(config.auth_mode, config.host):
        logger.warning("anybody who can reach %s may use the models: --auth off", address)
    if config.ssl_certfile is None:
        logger.warning("keys and prompts to %s are not encrypted here: --ssl-certfile, or a proxy before it", address)


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
