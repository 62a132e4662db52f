"""What no version names any more leaves every tier."""

from __future__ import annotations

import asyncio
from typing import Any


async def test_what_was_registered_and_deleted_between_two_looks_is_freed(house: Any) -> None:
    folder, registry = house.make_adapter("a"), house.services.registry
    registry.register_folder("a", folder)  # on the loop's own thread: the reconciler looks once both are done
    (digest,) = registry.delete("a")
    async with asyncio.timeout(60):
        while list((house.store / "blobs").iterdir()) or house.services.catalog.ledger.state.leases:
            await asyncio.sleep(0.005)
    assert house.services.catalog.snapshot.digests == frozenset(), digest
