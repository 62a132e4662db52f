"""Unregistering: gone for new requests at once; the reconciler frees the bytes once no running request holds them."""

from __future__ import annotations

from lora_serve.server.services import Services


async def remove_adapter(services: Services, name: str, version: int | None) -> tuple[str, ...]:
    """Unregister; durable on return. The digests whose bytes are freed in the background.

    Raises AdapterNotFoundError, AdapterUnavailableError.
    """
    return await services.edit(lambda: services.registry.delete(name, version), f"deleting {name}")
