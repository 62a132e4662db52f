"""Callers with limits, and a clock that stands still."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.tenant import Caller, Quota
from lora_serve.tenancy.rate_limiter import RateLimiter, SharedCounters


@dataclass
class Clock:
    """Unix seconds, at the beginning of a minute."""

    now: float = 60.0 * 30_000_000

    def __call__(self) -> float:
        return self.now


def caller(requests: int | None = None, tokens: int | None = None, **more: int) -> Caller:
    """Of the tenant acme, with one key that has no limits of its own."""
    return Caller("acme", key_id="k1", quota=Quota(requests_per_minute=requests, tokens_per_minute=tokens, **more))


def limiter(clock: Clock) -> RateLimiter:
    """In memory."""
    return RateLimiter(SharedCounters(None), clock)
