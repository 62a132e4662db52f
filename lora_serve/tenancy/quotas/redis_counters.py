"""The counts of a minute in Redis, so that replicas share them: INCRBY, EXPIRE and GET in one transaction, no scripts.

Keys: `<prefix>:rate:<name>:<minute>`.
"""

from __future__ import annotations

from collections.abc import Mapping

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lora_serve.adapters.redis_connection import said
from lora_serve.core.errors import ConfigError
from lora_serve.tenancy.quotas.counters import KEPT_MINUTES, Counts

_MAX_CONNECTIONS = 16  # more requests wait for one, which takes a fraction of a millisecond


class RedisCounters:
    """See RateCounters."""

    def __init__(self, url: str, prefix: str = "lora_serve", timeout: float = 0.5) -> None:
        """`timeout`: seconds for connecting and for each reply, which a request waits for. Raises ConfigError."""
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=timeout,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except ValueError as error:
            raise ConfigError(f"--redis-url: {error}") from None
        self._redis = redis.asyncio.Redis(connection_pool=pool)
        self._pool = pool
        self._prefix = f"{prefix}:rate:"

    async def add(self, amounts: Mapping[str, int], minute: int) -> Counts:
        """See RateCounters."""
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                for name, amount in amounts.items():
                    pipe.incrby(f"{self._prefix}{name}:{minute}", amount)
                    pipe.expire(f"{self._prefix}{name}:{minute}", 60 * KEPT_MINUTES)
                    pipe.get(f"{self._prefix}{name}:{minute - 1}")
                replies = await pipe.execute()
        except (redis.RedisError, ValueError) as error:
            raise ConnectionError(f"{type(error).__name__}: Redis {said(error)}") from None
        triples = zip(amounts, replies[::3], replies[2::3], strict=True)
        return {name: (int(before or 0), int(now)) for name, now, before in triples}

    async def close(self) -> None:
        """See RateCounters."""
        await self._redis.aclose()
        await self._pool.disconnect()
