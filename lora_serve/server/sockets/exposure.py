"""Who can reach the address that the server listens on, and whether that is what was asked for."""

from __future__ import annotations

import logging
import socket

from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import ConfigError
from lora_serve.tenancy.authentication.authenticator import auth_required, is_loopback

logger = logging.getLogger(__name__)


def check_exposure(config: ServerConfig, listener: socket.socket) -> None:
    """Raise ConfigError if others could use the models without a key and nobody said `--auth off`.

    `--auth auto` judges by the name in --host, and `localhost` may be any address that a hosts file says: what counts
    is where the socket is bound.
    """
    address = str(listener.getsockname()[0])
    if is_loopback(address):
        return
    if not auth_required(config.auth, config.host):
        if config.auth != "off":
            raise ConfigError(
                f"--host: {config.host} is {address}, which other machines can reach, and no key would be asked for: "
                "give --auth on, or --auth off if anybody may use the models"
            )
        logger.warning("anybody who can reach %s may use the models: --auth off", address)
    if config.tls is None:
        logger.warning("keys and prompts to %s are not encrypted here: --ssl-certfile, or a proxy before it", address)
