"""What a tenant uses now, beside its limits."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from lora_serve.core.tenant import Quota, Role
from tests.mock_engine import MockReply
from tests.server.accounting.conftest import NewKey, bearer, complete
from tests.server.conftest import House

LIMITED = Quota(requests_per_minute=10, tokens_per_minute=1000, max_running=1, registrations_per_minute=5)


async def use_of(http: aiohttp.ClientSession, tenant: str) -> dict[str, Any]:
    async with http.get(f"/admin/tenants/{tenant}/use") as answer:
        data = await answer.json()
        assert answer.status == 200, data
        assert (data["object"], data["tenant"]) == ("tenant_use", tenant)
        return dict(data["use"])


async def test_use_is_what_the_limits_count(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret = new_key("acme", LIMITED)
    (ref, _) = await house.register("acme/a"), await house.register("globex/b")
    assert (await complete(http, secret, model="acme/a")).status == 200
    await house.services.quotas.settled()
    [slot] = (await house.engine.stats()).slots
    assert slot.num_bytes > 0
    assert await use_of(admin, "acme") == {
        "requests_per_minute": 1, "tokens_per_minute": 6, "registrations_per_minute": 0, "max_running": 0,
        "max_queued": 0, "max_adapters": 1, "max_stored_bytes": ref.num_bytes,
        "device_bytes_guaranteed": slot.num_bytes, "device_bytes_max": slot.num_bytes,
    }  # fmt: skip


async def test_rows_that_run_and_requests_that_wait_are_told_apart(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret, gate = new_key("acme", LIMITED), asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate, has_started=True)
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(complete(http, secret)) for _ in range(3)]
        while not house.engine.requests or house.engine.gate.num_requests != 2:
            await asyncio.sleep(0.001)
        use = await use_of(admin, "acme")
        assert (use["max_running"], use["max_queued"], use["requests_per_minute"]) == (1, 2, 3)
        gate.set()
    assert [task.result().status for task in sent] == [200, 200, 200]


async def test_limits_that_nobody_counts_are_null_and_a_tenant_sees_its_own_alone(
    http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    own, _ = new_key("acme", role=Role.TENANT_ADMIN), new_key("globex")
    async with http.get("/admin/tenants/acme/use", headers=bearer(own)) as answer:
        use = (await answer.json())["use"]
    assert use == {
        "requests_per_minute": None, "tokens_per_minute": None, "registrations_per_minute": None, "max_running": None,
        "max_queued": 0, "max_adapters": 0, "max_stored_bytes": 0, "device_bytes_guaranteed": None,
        "device_bytes_max": None,
    }  # fmt: skip
    for name in ("globex", "nobody"):
        async with http.get(f"/admin/tenants/{name}/use", headers=bearer(own)) as answer:
            assert answer.status == 404
