"""HTTPS: the context of the server's certificate, which can be renewed while the server runs.

A listening socket keeps its context, whose authorities can be added to and never taken away. So each connection is
given the newest context while it begins, by the callback that is there for certificates by name.
"""

from __future__ import annotations

import logging
import ssl

from lora_serve.core.errors import ConfigError
from lora_serve.core.setting_groups.http import TlsConfig

logger = logging.getLogger(__name__)


class ServerTls:
    """The context to listen with; connections that begin after `reload` get the new certificate and authorities."""

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
            logger.error("the certificate stays as it was: %s", error)
        else:
            logger.info("the certificate was read anew")


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
