"""The listening socket, which takes few newcomers at a time, and no more once descriptors are short; and its
certificate.

asyncio takes as many in one go as may wait. Each is open before it can be counted, so a burst could take all the
descriptors of the process; without any left asyncio would go on to ask, and to log it, a thousand times a second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.setting_groups.http import TlsConfig
from lora_serve.tenancy.authenticator import auth_required, is_loopback

MAX_BURST = 64  # connections between two turns of the event loop; well below connections.RESERVED_DESCRIPTORS
SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_log = logging.getLogger(__name__)
# A body cut short or badly encoded; broken HTTP; a connection that is gone (TLS included).
_CLIENTS = (web.RequestPayloadError, HttpProcessingError, ConnectionError, asyncio.IncompleteReadError, TimeoutError)


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
    """Raise ConfigError if others could use the models without a key and without `--auth off`.

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
        _log.warning("anybody who can reach %s may use the models: --auth off", address)
    if config.ssl_certfile is None:
        _log.warning("keys and prompts to %s are not encrypted here: --ssl-certfile, or a proxy before it", address)


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


class ServerTls:
    """The context to listen with; connections that begin after `reload` get the new certificate and authorities.

    A listening socket keeps its context, whose authorities can be added to and never taken away. So each connection is
    given the newest context while it begins, by the callback that is there for certificates by name.
    """

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError if a file cannot be used."""
        self._config = config
        self.context = self._newest = _context(config)
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called for every connection, with or without a name."""
        connection.context = self._newest

    def reload(self) -> None:
        """Read certificate, key and authorities anew. If a file cannot be used, all stay and the log says so."""
        try:
            self._newest = _context(self._config)
        except ConfigError as error:
            _log.error("the certificate stays as it was: %s", error)
        else:
            _log.info("the certificate was read anew")


def _context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, config)
    if (file := config.ssl_ca_certs) is not None:
        try:
            context.load_verify_locations(file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"--ssl-ca-certs: {file} holds no certificates: {_reason(error)}") from None
    return context


def _load_certificate(context: ssl.SSLContext, config: TlsConfig) -> None:
    assert config.ssl_certfile is not None
    try:
        # A key under a password would otherwise ask for it at the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (ssl.SSLError, OSError) as error:
        files = f"{config.ssl_certfile} with the key in {config.ssl_keyfile or config.ssl_certfile}"
        raise ConfigError(f"--ssl-certfile: {files} cannot be used: {_reason(error)}") from None


def _reason(error: ssl.SSLError | OSError) -> str:
    """The reason in words; OpenSSL's own is in upper case with underscores."""
    if isinstance(error, ssl.SSLError):
        known = {"KEY_VALUES_MISMATCH": "the key is another certificate's"}
        reason = error.reason or "it is not PEM, or the key has a password"
        return known.get(reason, reason.replace("_", " ").lower())
    return error.strerror or str(error)
