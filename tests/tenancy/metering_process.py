"""Meters one request after another until it is killed, and says after each flush how many it has counted."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from lora_serve.tenancy.metering import Meter
from lora_serve.tenancy.shared import UsageExchange
from lora_serve.tenancy.usage import UsageFigures, UsageJournal, UsageKey


async def main(store: Path, redis_url: str | None) -> None:
    exchange = UsageExchange(redis_url, "t", "victim", 400, timeout=30) if redis_url else None
    meter, count = Meter(UsageJournal(store), exchange), 0
    while True:
        for _ in range(7):
            meter.record(UsageKey("acme", "a", "1", "sha256:a"), UsageFigures(requests=1))
            count += 1
        await meter.flush()
        print(count, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
