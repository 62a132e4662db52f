"""How many adapters and bytes a tenant may have, and what the engine is told of its device memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest

from lora_serve.core.errors import QuotaExceededError
from lora_serve.core.messages import SetTenantBudgets
from lora_serve.core.tenant import Quota, TenantBudget
from tests.server.accounting.conftest import NewKey
from tests.server.conftest import House


async def test_adapter_beyond_the_number_allowed_is_refused_before_it_is_fetched(
    house: House, admin: aiohttp.ClientSession, new_key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key("acme", Quota(max_adapters=1))
    await house.register("acme/one")
    monkeypatch.setattr(type(house.services.staging), "stage", lambda *_: pytest.fail("fetched"))
    async with admin.post("/admin/adapters", json={"id": "acme/two", "source": "anything"}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (403, "quota_exceeded")
        assert "has 1 adapters and may have 1" in error["message"]


async def test_new_version_and_the_same_content_again_are_not_another_adapter(house: House, new_key: NewKey) -> None:
    new_key("acme", Quota(max_adapters=1))
    await house.register("acme/one", seed=1)
    await house.register("acme/one", seed=2)
    await house.register("acme/one", seed=1)
    with pytest.raises(QuotaExceededError):
        await house.register("acme/two")
    await house.register("globex/two")


async def test_bytes_count_in_full_though_others_have_the_same_content(house: House, new_key: NewKey) -> None:
    size = (await house.register("globex/one", seed=1)).num_bytes
    new_key("acme", Quota(max_stored_bytes=2 * size))
    await house.register("acme/one", seed=1)
    await house.register("acme/one", seed=2)
    before = sorted(path.name for path in house.store.rglob("adapter_model.safetensors"))
    with pytest.raises(QuotaExceededError, match=f"has {2 * size} bytes of adapters and may have {2 * size}"):
        await house.register("acme/one", seed=3)
    assert sorted(path.name for path in house.store.rglob("adapter_model.safetensors")) == before
    await house.register("acme/one", seed=2)
    house.services.registry.delete("acme/one", 1)
    await house.register("acme/one", seed=3)


async def test_engine_is_told_budgets_at_the_start_and_when_they_change(house: House, new_key: NewKey) -> None:
    async def told(*budgets: TenantBudget) -> None:
        while SetTenantBudgets(budgets) not in house.engine.commands:
            await asyncio.sleep(0.001)

    new_key("acme", Quota(device_bytes_guaranteed=10, device_bytes_max=20))
    await told(TenantBudget("acme", 10, 20))
    directory = house.services.keys.directory
    quota = Quota(device_bytes_max=30)
    await asyncio.to_thread(directory.change_tenant, "acme", lambda tenant: replace(tenant, quota=quota))
    await told(TenantBudget("acme", 0, 30))
    await asyncio.to_thread(directory.delete_tenant, "acme")
    await told()
