"""Unregistering: gone for new requests at once, bytes freed once no running request holds them."""

from __future__ import annotations

import logging

from lora_serve.core.commands import Evict, Unpin
from lora_serve.core.errors import LoraServeError
from lora_serve.server.services import Services

logger = logging.getLogger(__name__)


async def remove_adapter(services: Services, name: str, version: int | None) -> tuple[str, ...]:
    """Unregister; durable on return. The digests whose bytes are freed in the background.

    Raises AdapterNotFoundError.
    """
    work = services.registry_thread.run(lambda: services.registry.delete(name, version))
    digests = await services.background.complete(work, f"deleting {name}")
    for digest in digests:
        services.background.start(_free(services, digest), f"freeing {digest}")
    return digests


async def _free(services: Services, digest: str) -> None:
    """Every tier. The engine waits for the rows that hold it; the catalog may name it again meanwhile."""
    for command in (Unpin(digest), Evict(digest, forget=True)):
        if digest in services.catalog.snapshot.digests:
            return
        try:
            await services.client.adapters(command)
        except LoraServeError as error:
            logger.warning("%s: %s", digest, error)
    await services.registry_thread.run(lambda: services.registry.collect(digest))
