"""How many uploads and registrations a tenant may begin within a minute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lora_serve.core.tenant import Quota, Role
from tests.server.accounting.conftest import NewKey, bearer, complete
from tests.server.admin.test_upload import leftovers, tar_of
from tests.server.conftest import House
from tests.tenancy.limited import Clock

TWO = Quota(registrations_per_minute=2)
Put = Callable[..., Any]


@pytest.fixture
def put(house: House, http: aiohttp.ClientSession) -> Put:
    """put(secret, "up") -> the answer to an upload."""
    folder = house.make_adapter("sent", 5)

    async def put(secret: str, name: str = "up", content: bytes | None = None) -> aiohttp.ClientResponse:
        data = tar_of(folder) if content is None else content
        async with http.put(f"/admin/adapters/acme/{name}", data=data, headers=bearer(secret)) as response:
            await response.read()
            return response

    return put


async def test_uploads_beyond_the_limit_are_told_when_to_come_again(
    house: House, put: Put, new_key: NewKey, clock: Clock
) -> None:
    secret = new_key("acme", TWO, role=Role.TENANT_ADMIN)
    assert [(await put(secret, name)).status for name in ("a", "b")] == [201, 201]
    before = set(leftovers(house))
    for _ in range(2):  # the second refusal is remembered
        refused = await put(secret, "c")
        assert refused.status == 429
        error = (await refused.json())["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert "registrations per minute: limit 2" in error["message"]
        assert (refused.headers["Retry-After"], refused.headers["x-ratelimit-remaining-registrations"]) == ("90", "0")
    assert set(leftovers(house)) <= before
    assert "acme/c" not in house.services.catalog.snapshot.entries
    clock.now += 90
    assert (await put(secret, "c")).status == 201


async def test_registrations_and_uploads_are_counted_together_whatever_becomes_of_them(
    http: aiohttp.ClientSession, put: Put, new_key: NewKey
) -> None:
    secret = new_key("acme", TWO, role=Role.TENANT_ADMIN)
    assert (await put(secret, content=b"no archive")).status == 422
    assert (await register(http, secret, "acme/x", "upload://nothing")).status == 403  # not begun, so not counted
    assert (await put(secret)).status == 201
    assert (await put(secret)).status == 429


async def register(http: aiohttp.ClientSession, secret: str, name: str, source: str) -> aiohttp.ClientResponse:
    async with http.post("/admin/adapters", json={"id": name, "source": source}, headers=bearer(secret)) as response:
        await response.read()
        return response


async def test_admins_registrations_from_a_source_are_counted_for_a_key_with_a_limit(
    house: House, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret = new_key("operations", key_quota=TWO, role=Role.ADMIN)
    source = str(house.make_adapter("source", 6))
    assert [(await register(http, secret, f"acme/{n}", source)).status for n in range(3)] == [201, 201, 429]


async def test_answers_and_other_tenants_are_not_held_up(
    house: House, http: aiohttp.ClientSession, put: Put, new_key: NewKey
) -> None:
    secret = new_key("acme", Quota(registrations_per_minute=1), role=Role.TENANT_ADMIN)
    assert [(await put(secret)).status for _ in range(2)] == [201, 429]
    answer = await complete(http, secret)
    assert answer.status == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    other = new_key("globex", role=Role.TENANT_ADMIN)
    async with http.put("/admin/adapters/globex/up", data=b"none", headers=bearer(other)) as response:
        assert response.status == 422


async def test_tenant_that_may_register_nothing_is_told_so(put: Put, new_key: NewKey, clock: Clock) -> None:
    secret = new_key("acme", Quota(registrations_per_minute=0), role=Role.TENANT_ADMIN)
    for _ in range(2):
        refused = await put(secret)
        assert refused.status == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 120
        clock.now += 200


async def test_admin_key_has_no_limit(house: House, admin: aiohttp.ClientSession, new_key: NewKey) -> None:
    new_key("acme", Quota(registrations_per_minute=0))
    folder: Path = house.make_adapter("sent", 7)
    async with admin.put("/admin/adapters/acme/up", data=tar_of(folder)) as response:
        assert response.status == 201
