"""Periodic work: keys' last uses, the loop's lag, byte-seconds of adapters, tenants' budgets of memory."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from aiohttp import web

from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.errors import AdapterUnavailableError, LoraServeError
from lora_serve.core.messages import SetTenantBudgets
from lora_serve.core.stats import EngineStats, SlotInfo
from lora_serve.core.tenant import TenantBudget
from lora_serve.server.background.tasks import running
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.authenticator import KeyTable
from lora_serve.tenancy.usage import UsageFigures, UsageKey

KEY_USES_INTERVAL = 30.0  # seconds; what a crash forgets
logger = logging.getLogger(__name__)


async def noting_uses(app: web.Application) -> AsyncIterator[None]:
    """Write the uses while the application runs, and once more at its end."""
    keys = app[SERVICES].keys
    async with running(functools.partial(_keep, keys), name="noting keys' uses"):
        yield
    await write_uses(keys)


async def write_uses(keys: KeyTable) -> None:
    """Write all uses in one commit; if that fails, keep them for the next."""
    uses = keys.take_uses()
    if not uses:
        return
    try:
        await asyncio.to_thread(keys.directory.note_uses, uses)
    except AdapterUnavailableError as error:
        logger.warning("the last uses of %d keys could not be noted: %s", len(uses), error)
        keys.give_back(uses)


async def _keep(keys: KeyTable) -> None:
    while True:
        await asyncio.sleep(KEY_USES_INTERVAL)
        await write_uses(keys)


LAG_INTERVAL = 0.05  # seconds between two calls
MAX_SAMPLES = 1000  # for one late call


async def probing(app: web.Application) -> AsyncIterator[None]:
    """Put the lag into the metrics while the application runs."""
    observe = app[SERVICES].metrics.loop_lag.observe
    async with running(lambda: probe(observe), name="measuring the event loop's lag"):
        yield


async def probe(observe: Callable[[float], None], interval: float = LAG_INTERVAL) -> None:
    """Call `observe` with the lag in seconds, again and again."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        for lag in samples(loop.time() - due, interval):
            observe(lag)


def samples(lag: float, interval: float) -> list[float]:
    """The lag of a late call, and of each call that would have been due while it was late."""
    count = min(MAX_SAMPLES, 1 + max(0, int(lag / interval)))
    return [max(0.0, lag - number * interval) for number in range(count)]


RESIDENCY_INTERVAL = 5.0  # seconds between two looks: the error for an adapter that comes or goes


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
        await asyncio.sleep(RESIDENCY_INTERVAL)
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


_RETRY = 1.0  # seconds until an engine that was not there is told again
_NONE = SetTenantBudgets(())


def budgets_of(services: Services) -> SetTenantBudgets:
    """The budgets that the directory has now."""
    tenants = services.keys.directory.snapshot.tenants
    limited = {name: t.quota for name, t in tenants.items() if t.quota.device_bytes_guaranteed is not None}
    limited |= {name: t.quota for name, t in tenants.items() if t.quota.device_bytes_max is not None}
    return SetTenantBudgets(
        tuple(
            TenantBudget(name, limited[name].device_bytes_guaranteed or 0, limited[name].device_bytes_max)
            for name in sorted(limited)
        )
    )


async def following_budgets(app: web.Application) -> AsyncIterator[None]:
    """Send budgets while the application runs."""
    async with running(functools.partial(_follow, app[SERVICES]), name="following tenants' budgets"):
        yield


async def _follow(services: Services) -> None:
    loop, changed, sent = asyncio.get_running_loop(), asyncio.Event(), _NONE

    def listener() -> None:
        loop.call_soon_threadsafe(changed.set)

    ledger = services.keys.directory.ledger
    ledger.listen(listener)
    changed.set()
    try:
        while True:
            await changed.wait()
            changed.clear()
            command = budgets_of(services)
            if command == sent:
                continue
            try:
                await services.client.adapters(command)
                sent = command
            except LoraServeError as error:  # no engine at present
                logger.debug("the engine could not be told the tenants' budgets: %s", error)
                await asyncio.sleep(_RETRY)
                changed.set()
    finally:
        ledger.unlisten(listener)
