"""Byte-seconds of adapters on the device. The slots are looked at now and then, and counted since the last look."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from aiohttp import web

from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.errors import LoraServeError
from lora_serve.core.stats import EngineStats, SlotInfo
from lora_serve.server.background.tasks import running
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.usage.figures import UsageFigures, UsageKey

INTERVAL = 5.0  # seconds between two looks: the error for an adapter that comes or goes


async def metering(app: web.Application) -> AsyncIterator[None]:
    """Meter residency and write usage down while the application runs; write the rest at the end."""
    services = app[SERVICES]
    look = functools.partial(_keep_looking, services)
    async with running(services.meter.keep_flushing, look, name="metering"):
        yield
    await services.quotas.settled()
    await services.meter.flush()


async def _keep_looking(services: Services) -> None:
    last: float | None = None  # None: the engine was not there
    while True:
        await asyncio.sleep(INTERVAL)
        try:
            stats = await services.client.stats()
        except LoraServeError:
            last = None
            continue
        now = time.monotonic()
        if last is not None:
            record_residency(services, stats, now - last)
        last = now


def record_residency(services: Services, stats: EngineStats, seconds: float) -> None:
    """Meter the byte-seconds of the slots for the owners of the adapters. Servers that share a replica of a fleet share
    these too, as their usage is added up.
    """
    num_servers = {replica.replica: replica.num_servers for replica in stats.replicas or ()}
    for slot in stats.slots:
        key = _key_of(services.catalog.snapshot, slot)
        if key is not None:
            byte_seconds = slot.num_bytes * seconds / max(1, num_servers.get(slot.replica, 1))
            services.meter.record(key, UsageFigures(residency_byte_seconds=byte_seconds))


def _key_of(snapshot: Snapshot, slot: SlotInfo) -> UsageKey | None:
    """None: the adapter was deleted, and only its last rows keep it."""
    entry = snapshot.entries.get(slot.name)
    if entry is None:
        return None
    with suppress(StopIteration):
        version = next(version for version in entry.versions if version.digest == slot.digest)
        return UsageKey(entry.tenant, entry.name, str(version.version), version.digest)
    return None
