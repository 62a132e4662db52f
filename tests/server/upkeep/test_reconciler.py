"""What no version names any more leaves every tier."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lora_serve.core.errors import NotReadyError
from lora_serve.core.messages import Pin
from lora_serve.server import upkeep
from lora_serve.server.admin.adapters import set_pinned


async def test_what_was_registered_and_deleted_between_two_looks_is_freed(house: Any) -> None:
    folder, registry = house.make_adapter("a"), house.services.registry
    registry.register_folder("a", folder)  # on the loop's own thread: the reconciler looks once both are done
    (digest,) = registry.delete("a")
    async with asyncio.timeout(60):
        while list((house.store / "blobs").iterdir()) or house.services.catalog.ledger.state.leases:
            await asyncio.sleep(0.005)
    assert house.services.catalog.snapshot.digests == frozenset(), digest


async def test_adapter_that_is_pinned_while_no_engine_is_there_is_brought_to_the_next_one(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "RECONCILER_RETRY", 0.01)
    ref = await house.register("a")
    house.engine.command_error = NotReadyError("No engine is there at present; try again.")
    await set_pinned(house.services, "a", True)
    async with asyncio.timeout(60):
        while Pin(ref) not in house.engine.commands:
            await asyncio.sleep(0.005)
        house.engine.command_error = None
        while ref.digest not in house.engine._pinned:
            await asyncio.sleep(0.005)
