"""Tasks as long as the application: keys' last uses, the loop's lag, byte-seconds of adapters, tenants' budgets of
memory; and the reconciler, by which the engine follows the catalog, whether it was changed by this server's admin or
another replica.

The reconciler compares what is there with what should be there, so a missed change is made up for with the next one:
content that no version names any more leaves every tier, pinned ids are on the device.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, LoraServeError, NotReadyError
from lora_serve.core.messages import AdapterCommand, Evict, Pin, SetTenantBudgets, Unpin
from lora_serve.core.stats import EngineStats, SlotInfo
from lora_serve.core.tenant import TenantBudget
from lora_serve.server.background.tasks import running
from lora_serve.server.lifecycle import ServerState
from lora_serve.server.services import SERVICES, Services
from lora_serve.tenancy.authenticator import KeyTable
from lora_serve.tenancy.usage import UsageFigures, UsageKey

KEY_USES_INTERVAL = 30.0  # seconds; what a crash forgets
logger = logging.getLogger(__name__)
LAG_INTERVAL = 0.05  # seconds between two calls
MAX_SAMPLES = 1000  # for one late call
RESIDENCY_INTERVAL = 5.0  # seconds between two looks: the error for an adapter that comes or goes
_BUDGETS_RETRY = 1.0  # seconds until budgets are sent again to an engine that was not there
_NO_BUDGETS = SetTenantBudgets(())
RECONCILER_RETRY = 2.0  # seconds between two tries to delete what the store could not delete
BLOB_GRACE = (
    1.0  # seconds that a blob in the shared store outlives its name, so that other replicas can take their hold
)
PIN_TIMEOUT = 60.0  # seconds for bringing one pinned adapter onto the device, while others wait
SWEEP_SECONDS, SWEEP_PAUSE = 0.005, 0.02  # of work on the blobs that are here, and of rest after it


async def noting_uses(app: web.Application) -> AsyncIterator[None]:
    """Write the uses while the application runs, and once more at its end."""
    keys = app[SERVICES].keys
    async with running(functools.partial(_keep_noting_uses, keys), name="noting keys' uses"):
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


async def _keep_noting_uses(keys: KeyTable) -> None:
    while True:
        await asyncio.sleep(KEY_USES_INTERVAL)
        await write_uses(keys)


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
    async with running(functools.partial(_follow_budgets, app[SERVICES]), name="following tenants' budgets"):
        yield


async def _follow_budgets(services: Services) -> None:
    loop, changed, sent = asyncio.get_running_loop(), asyncio.Event(), _NO_BUDGETS
    listener = functools.partial(loop.call_soon_threadsafe, changed.set)
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
                await asyncio.sleep(_BUDGETS_RETRY)
                changed.set()
    finally:
        ledger.unlisten(listener)


class Reconciler:
    """Runs on the event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._seen = services.catalog.snapshot
        self._freeing: set[str] = set()  # digests
        self._pinned = set(pinned_refs(self._seen))  # digests; the wiring pins those of the start
        self._changed = asyncio.Event()
        self._pins_changed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the catalog, from the moment of construction on, for as long as the block lasts."""
        loop = asyncio.get_running_loop()
        self._services.catalog.ledger.listen(functools.partial(loop.call_soon_threadsafe, self._changed.set))
        self._changed.set()
        works = (self._follow, self._keep_pins, self._keep_collecting, self._sweep)
        async with running(*works, name="following the catalog"):
            yield

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            before, self._seen = self._seen, self._services.catalog.snapshot
            # What came and went between two looks was never seen, but it was noted as removed.
            unseen = self._services.catalog.drained - self._freeing
            gone = before.digests - self._seen.digests if before.num_gone != self._seen.num_gone else set()
            for digest in gone | unseen:
                self._freeing.add(digest)
                self._services.background.start(self._free(digest), f"freeing {digest}")
            self._pins_changed.set()

    async def _keep_pins(self) -> None:
        """One command after another, each chosen by what should be pinned at that moment."""
        while True:
            await self._pins_changed.wait()
            self._pins_changed.clear()
            while (command := self._next_pin()) is not None:
                error = await self._try(command)
                if isinstance(command, Pin) and isinstance(error, NotReadyError):  # no engine has seen it
                    self._pinned.discard(command.adapter.digest)
                    await asyncio.sleep(RECONCILER_RETRY)

    async def _keep_collecting(self) -> None:
        while True:
            await asyncio.sleep(RECONCILER_RETRY)
            if self._services.registry.has_pending:
                await asyncio.to_thread(self._services.registry.retry_pending)

    async def _sweep(self) -> None:
        """Look at every blob that is here, a little at a time, once the server is ready."""
        while self._services.registry.is_sweeping:
            await asyncio.sleep(SWEEP_PAUSE)
            if self._services.lifecycle.state is ServerState.READY:
                await asyncio.to_thread(self._services.registry.sweep, SWEEP_SECONDS)

    def _next_pin(self) -> AdapterCommand | None:
        """None: nothing is left to do. A command that fails in an engine is not tried again: one bad adapter holds up
        no other.
        """
        wanted = pinned_refs(self._services.catalog.snapshot)
        for digest in self._pinned - wanted.keys():
            self._pinned.remove(digest)
            return Unpin(digest)
        for digest in wanted.keys() - self._pinned:
            self._pinned.add(digest)
            return Pin(wanted[digest])
        return None

    async def _free(self, digest: str) -> None:
        """Free every tier. The engine waits for the rows that hold the content, which may be named again meanwhile."""
        try:
            await self._leave(digest)
        finally:
            self._freeing.discard(digest)

    async def _leave(self, digest: str) -> None:
        services = self._services
        if services.catalog.is_shared:
            await asyncio.gather(asyncio.to_thread(services.catalog.leases.drain, digest), return_exceptions=True)
        for command in (Unpin(digest), Evict(digest, forget=True)):
            if digest not in services.catalog.snapshot.digests:
                await self._try(command, None)  # waits for the rows, however long they take
        if services.catalog.is_shared:
            await asyncio.sleep(BLOB_GRACE)
        await asyncio.to_thread(services.registry.collect, digest)

    async def _try(self, command: AdapterCommand, seconds: float | None = PIN_TIMEOUT) -> Exception | None:
        """The error that the command failed with."""
        try:
            async with asyncio.timeout(seconds):
                await self._services.client.adapters(command)
        except (LoraServeError, TimeoutError) as error:
            logger.warning("%s: %s", type(command).__name__, error)
            return error
        return None


def pinned_refs(snapshot: Snapshot) -> dict[str, AdapterRef]:
    """The versions that must be on the device, by digest: a pinned id's default version and its canary."""
    pinned = (snapshot.entries[name] for name in sorted(snapshot.pinned))
    return {version.digest: entry.ref(version) for entry in pinned for version in entry.routed}
