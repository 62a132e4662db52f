"""Opens connections to Redis with timeouts and at most one retry."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lora_serve.core.errors import AdapterUnavailableError, ConfigError

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


_REFUSALS = {  # by the first word of what Redis says
    "DENIED": "is in protected mode: give it a password, or bind it to an address of its own",
    "NOAUTH": "wants a password: put it into --redis-url (redis://:PASSWORD@host)",
    "WRONGPASS": "takes another password, or user, than --redis-url has",
    "NOPERM": "does not let the user of --redis-url do this: widen its ACL",
    "READONLY": "is a replica that takes no writes: name the primary in --redis-url",
    "OOM": "is full: raise its maxmemory, or free some",
    "MISCONF": "cannot save to its disk, and takes no writes until it can",
    "LOADING": "is loading its data set: it answers once it has",
}
_CODES = {
    redis.AuthenticationError: "NOAUTH",
    redis.exceptions.NoPermissionError: "NOPERM",
    redis.exceptions.ReadOnlyError: "READONLY",
    redis.exceptions.OutOfMemoryError: "OOM",
    redis.BusyLoadingError: "LOADING",
}


def said(error: BaseException) -> str:
    """The error as a predicate of Redis: its refusal with what to do, its words, or that it cannot be reached."""
    first = str(error).partition(" ")[0].strip("-:,").upper()
    named = "WRONGPASS" if "username-password" in str(error) else first
    code = named if named in _REFUSALS else next((c for kind, c in _CODES.items() if isinstance(error, kind)), "")
    if not code and isinstance(error, redis.ResponseError):  # behind the comma are the arguments, among them records
        return f"answers: {str(error).partition(',')[0][:100]}"
    return f"{_REFUSALS[code]} ({code})" if code else "cannot be reached at present"


@contextmanager
def readable_errors(title: str) -> Iterator[None]:
    """Raises AdapterUnavailableError for errors of Redis and for what others wrote there. `title`: what is shared."""
    try:
        yield
    except (redis.RedisError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.debug("the shared %s: %r", title, error)
        raise AdapterUnavailableError(f"The shared {title} in Redis {said(error)}.", retry_after=5) from None


def drop_other_type(client: Any, key: str, kind: bytes) -> None:
    """Delete a foreign value of another type at one of our keys. Raises redis.RedisError."""
    if client.type(key) not in (kind, b"none"):
        _log.warning("%s in Redis was no %s; it is dropped", key, kind.decode())
        client.delete(key)
