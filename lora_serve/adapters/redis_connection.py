"""Opens connections to Redis with timeouts and at most one retry."""

from __future__ import annotations

import logging
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lora_serve.core.errors import ConfigError

_log = logging.getLogger(__name__)


def connect(url: str, timeout: float) -> Any:
    """A client that connects when it is first used. `timeout`: seconds for connecting and for each reply.

    Retries once, at once, after a connection was closed by the server. Raises ConfigError for an invalid URL.
    """
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            health_check_interval=30,
        )
    except (ValueError, TypeError) as error:
        # urllib's message about an invalid port may show a part of a password with an unescaped `#` or `/`.
        known = (
            str(error) if "scheme" in str(error) else "is not redis://user:password@host:port/db, rediss:// or unix://"
        )
        raise ConfigError(f"--redis-url: {known}") from None


def drop_other_type(client: Any, key: str, kind: bytes) -> None:
    """Delete a foreign value of another type at one of our keys. Raises redis.RedisError."""
    if client.type(key) not in (kind, b"none"):
        _log.warning("%s in Redis was no %s; it is dropped", key, kind.decode())
        client.delete(key)
