"""A tenant that is made under the name of a deleted one: the books of the one before are the operator's alone."""

from __future__ import annotations

from dataclasses import replace

import aiohttp
import pytest

from lora_serve.core.stats import EMPTY, SlotInfo
from lora_serve.core.tenant import Quota, Role
from lora_serve.server.upkeep import record_residency
from tests.server.accounting.conftest import NewKey, bearer, complete
from tests.server.accounting.test_audit_api import audit
from tests.server.accounting.test_usage_api import usage
from tests.server.conftest import House
from tests.tenancy.limited import Clock


async def delete(admin: aiohttp.ClientSession, tenant: str) -> None:
    async with admin.delete(f"/admin/tenants/{tenant}") as response:
        assert response.status == 200


async def use(house: House, http: aiohttp.ClientSession, secret: str, seed: int) -> None:
    """One request for an adapter that is on the device for a second."""
    ref = await house.register("acme/support", seed)
    assert (await complete(http, secret, model="acme/support")).status == 200
    slot = SlotInfo(1, 1, ref.digest, ref.name, 1000, 0, False)
    record_residency(house.services, replace(EMPTY, slots=(slot,)), 1.0)


@pytest.mark.parametrize("pause", [10, 86_400])
async def test_usage_and_acts_of_the_one_before_are_shown_to_the_operator_only(
    house: House,
    http: aiohttp.ClientSession,
    admin: aiohttp.ClientSession,
    new_key: NewKey,
    clock: Clock,
    pause: int,
) -> None:
    """Even if it all happens within one bucket."""
    before = new_key("acme", role=Role.TENANT_ADMIN)
    await use(house, http, before, seed=1)
    async with admin.post("/admin/tenants/acme/keys", json={}) as response:
        assert response.status == 201
    await delete(admin, "acme")
    clock.now += pause
    own = new_key("acme", role=Role.TENANT_ADMIN)
    async with aiohttp.ClientSession(house.url, headers=bearer(own)) as client:
        assert (await usage(client), await audit(client)) == ([], [])
        await use(house, http, own, seed=2)
        (row,) = await usage(client, by="tenant")
        assert (row["requests"], row["residency_byte_seconds"]) == (1, 1000.0)
        async with client.post("/admin/tenants/acme/keys", json={}) as response:
            assert response.status == 201
        assert len(await audit(client)) == 1
    (row,) = await usage(admin, by="tenant")
    assert (row["requests"], row["residency_byte_seconds"]) == (2, 2000.0)
    assert len(await audit(admin)) == 3


async def test_what_the_one_before_has_used_of_a_minute_is_not_charged_to_it(
    http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey, clock: Clock
) -> None:
    quota = Quota(requests_per_minute=1)
    before = new_key("acme", quota)
    assert [(await complete(http, before)).status for _ in range(2)] == [200, 429]
    await delete(admin, "acme")
    clock.now += 1
    assert (await complete(http, new_key("acme", quota))).status == 200
