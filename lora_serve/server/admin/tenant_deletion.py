"""A tenant's end: keys first, so that nothing new comes, then adapters; then the traces of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from lora_serve.adapters.catalog.ledger import Ledger
from lora_serve.adapters.catalog.state import CatalogState
from lora_serve.adapters.catalog.tenant_removal import TenantRemoval
from lora_serve.core.errors import AdapterUnavailableError, NotFoundError
from lora_serve.server.services import Services

PATIENCE = 60.0  # seconds that running requests may hold the last of its blobs, after which traces of those stay
logger = logging.getLogger(__name__)


async def delete_all_of(services: Services, tenant: str) -> tuple[str, ...]:
    """The ids of its adapters; durable on return. Blobs and caches are freed in the background, on every replica.

    After a crash in between, the same call completes it. Raises NotFoundError if there was nothing,
    AdapterUnavailableError.
    """
    was_there = await asyncio.to_thread(services.keys.directory.delete_tenant, tenant)
    removal = await asyncio.to_thread(services.registry.delete_tenant, tenant)
    if not was_there and not removal.names:
        raise NotFoundError(tenant)
    services.background.start(_forget(services, removal), f"forgetting the tenant {tenant}")
    return removal.names


async def _forget(services: Services, removal: TenantRemoval) -> None:
    """Once every replica has freed the blobs, which it notes in the journal, the journals' old pages go too."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            await _freed(services.catalog.ledger, removal.strays)
    for ledger in (services.catalog.ledger, services.keys.directory.ledger):
        try:
            await asyncio.to_thread(ledger.forget)
        except AdapterUnavailableError as error:
            logger.warning("names of a deleted tenant's adapters stay in a journal's list of changes: %s", error)


async def _freed(ledger: Ledger[CatalogState], digests: Iterable[str]) -> None:
    """Return when no replica holds any of them any more."""
    loop, changed, waited_for = asyncio.get_running_loop(), asyncio.Event(), set(digests)

    def listener() -> None:
        loop.call_soon_threadsafe(changed.set)

    ledger.listen(listener)
    try:
        while waited_for & ledger.state.leases.keys():
            await changed.wait()
            changed.clear()
    finally:
        ledger.unlisten(listener)
