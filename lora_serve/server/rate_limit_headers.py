"""x-ratelimit-* in OpenAI's names and forms: https://platform.openai.com/docs/guides/rate-limits"""

from __future__ import annotations

import math

from lora_serve.core.errors import Standings


def rate_limit_headers(standings: Standings) -> dict[str, str]:
    """Three headers for each limit that there is."""
    headers: dict[str, str] = {}
    for unit, standing in standings.items():
        headers[f"x-ratelimit-limit-{unit}"] = str(standing.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(standing.remaining)
        headers[f"x-ratelimit-reset-{unit}"] = duration(standing.reset)
    return headers


def duration(seconds: float) -> str:
    """`1m30s`, `6.5s`, `12ms`, `0s`: rounded up, so that waiting that long is enough."""
    milliseconds = math.ceil(1000 * seconds)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
