"""GET /admin/adapters: pages, tenants, states."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest


async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with session.get(path) as answer:
        return answer.status, await answer.json()


async def test_list_is_by_name_in_pages(admin: aiohttp.ClientSession, house: Any) -> None:
    for seed, name in enumerate(("b", "acme/x", "c", "a", "acme/y")):
        await house.register(name, seed)
    _, first = await get(admin, "/admin/adapters?limit=2")
    assert [card["id"] for card in first["data"]] == ["a", "acme/x"]
    assert first["has_more"] is True
    _, second = await get(admin, f"/admin/adapters?limit=3&after={first['last_id']}")
    assert [card["id"] for card in second["data"]] == ["acme/y", "b", "c"]
    assert second["has_more"] is False


async def test_list_may_be_narrowed_to_a_tenant_or_a_state(admin: aiohttp.ClientSession, house: Any) -> None:
    for seed, name in enumerate(("acme/x", "globex/y", "acme/z")):
        await house.register(name, seed)
    async with admin.post("/admin/adapters/acme/z/prefetch") as answer:
        assert answer.status == 200
    _, found = await get(admin, "/admin/adapters?tenant=acme")
    assert [card["id"] for card in found["data"]] == ["acme/x", "acme/z"]
    _, found = await get(admin, "/admin/adapters?state=on_device")
    assert [card["id"] for card in found["data"]] == ["acme/z"]
    _, found = await get(admin, "/admin/adapters?tenant=nobody")
    assert found == {"object": "list", "data": [], "has_more": False, "last_id": None}


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999", "limit=-1", "limit=²", "state=asleep"])
async def test_wrong_query_is_400(admin: aiohttp.ClientSession, query: str) -> None:
    assert (await get(admin, f"/admin/adapters?{query}"))[0] == 400
