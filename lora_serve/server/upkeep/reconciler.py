"""Makes the engine follow the catalog, whoever changed it: this server's admin or another replica.

The reconciler compares what is there with what should be there, so a missed change is made up for with the next one:
content that no version names any more leaves every tier, pinned ids are on the device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import LoraServeError, NotReadyError
from lora_serve.core.messages import AdapterCommand, Evict, Pin, Unpin
from lora_serve.server.background.tasks import running
from lora_serve.server.lifecycle import ServerState
from lora_serve.server.services import Services

RETRY = 2.0  # seconds between two tries to delete what the store could not delete
GRACE = 1.0  # seconds that a blob in the shared store outlives its name, so that other replicas can take their hold
TIMEOUT = 60.0  # seconds for bringing one pinned adapter onto the device, while others wait
SWEEP_SECONDS, SWEEP_PAUSE = 0.005, 0.02  # of work on the blobs that are here, and of rest after it
logger = logging.getLogger(__name__)


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

        def changed() -> None:
            loop.call_soon_threadsafe(self._changed.set)

        self._services.catalog.ledger.listen(changed)
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
                    await asyncio.sleep(RETRY)

    async def _keep_collecting(self) -> None:
        while True:
            await asyncio.sleep(RETRY)
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
            await asyncio.sleep(GRACE)
        await asyncio.to_thread(services.registry.collect, digest)

    async def _try(self, command: AdapterCommand, seconds: float | None = TIMEOUT) -> Exception | None:
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
