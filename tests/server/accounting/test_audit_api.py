"""Admin acts in the audit log: all of them, as they were, before they are answered."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.tenant import Role
from tests.server.accounting.conftest import NewKey, bearer, complete
from tests.server.conftest import KEY, House


async def audit(http: aiohttp.ClientSession, **query: str) -> list[dict[str, Any]]:
    async with http.get("/admin/audit", params=query) as response:
        assert response.status == 200, await response.text()
        return list((await response.json())["data"])


async def test_every_act_is_noted_with_who_what_and_what_came_of_it(house: House, admin: aiohttp.ClientSession) -> None:
    folder = house.make_adapter("support", 1)
    async with admin.post("/admin/adapters", json={"id": "acme/support", "source": str(folder)}) as response:
        assert response.status == 201
        request_id, digest = response.headers["X-Request-Id"], (await response.json())["versions"][0]["digest"]
    async with admin.post("/admin/adapters/acme/support/pin") as response:
        assert response.status == 200
    async with admin.delete("/admin/adapters/acme/support?version=7") as response:
        assert response.status == 404
    async with admin.delete("/admin/adapters/acme/support") as response:
        assert response.status == 200
    acts = await audit(admin)
    assert [(act["action"], act["subject"], act["outcome"]) for act in reversed(acts)] == [
        ("POST /admin/adapters", "acme/support", 201),
        ("POST /admin/adapters/{id}/pin", "acme/support", 200),
        ("DELETE /admin/adapters/{id}", "acme/support@7", 404),
        ("DELETE /admin/adapters/{id}", "acme/support", 200),
    ]
    assert {(act["key"], act["role"], act["owner"], act["digest"]) for act in acts} == {
        ("admin", "admin", "acme", digest)
    }
    assert acts[-1]["request_id"] == request_id
    assert [act["number"] for act in acts] == [4, 3, 2, 1]


async def test_tenants_and_keys_are_noted_without_their_secrets(house: House, admin: aiohttp.ClientSession) -> None:
    async with admin.post("/admin/tenants", json={"name": "acme"}) as response:
        assert response.status == 201
    async with admin.post("/admin/tenants/acme/keys", json={"label": "ci"}) as response:
        made = await response.json()
    async with admin.delete(f"/admin/tenants/acme/keys/{made['secret']}") as response:
        assert response.status == 404  # in place of its id
    async with admin.delete(f"/admin/tenants/acme/keys/x?version={made['secret']}") as response:
        assert response.status == 404
    async with admin.delete(f"/admin/tenants/acme/keys/{made['id']}") as response:
        assert response.status == 200
    acts, hidden = await audit(admin), f"ls-{made['id']}-***"
    subjects = [f"acme/{made['id']}", f"acme/x@{hidden}", f"acme/{hidden}", f"acme/{made['id']}", "acme"]
    assert [act["subject"] for act in acts] == subjects
    assert {act["owner"] for act in acts} == {"acme"}
    text = json.dumps(acts) + "".join(line.line for line in house.services.audit._journal.lines())  # type: ignore[union-attr]
    assert made["secret"] not in text
    assert KEY not in text


async def test_reading_and_inference_and_strangers_are_no_acts(
    house: House, admin: aiohttp.ClientSession, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    await complete(http, new_key("acme"))
    async with admin.get("/admin/adapters") as response:
        assert response.status == 200
    for headers in ({}, bearer("ls-nobody-knows")):
        async with http.delete("/admin/adapters/acme/a", headers=headers) as response:
            assert response.status == 401
    assert await audit(admin) == []


async def test_refused_act_of_a_known_key_is_noted(
    house: House, admin: aiohttp.ClientSession, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    headers = bearer(new_key("acme", role=Role.TENANT_ADMIN))
    async with http.delete("/admin/tenants/globex", headers=headers) as response:
        assert response.status == 403
    async with http.put("/admin/engine", json={}, headers=headers) as response:
        assert response.status == 403
    acts = await audit(admin)
    assert [(act["tenant"], act["action"], act["outcome"]) for act in acts] == [
        ("acme", "PUT /admin/engine", 403),
        ("acme", "DELETE /admin/tenants/{tenant}", 403),
    ]


async def test_what_a_tenant_tries_on_another_is_not_told_to_that_one(
    house: House, admin: aiohttp.ClientSession, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    """Or each would learn of the other's name and keys."""
    prying, other = new_key("acme", role=Role.TENANT_ADMIN), new_key("globex", role=Role.TENANT_ADMIN)
    async with http.post("/admin/tenants/globex/keys", json={}, headers=bearer(prying)) as response:
        assert response.status == 404
    for session, seen in ((admin, 1), (prying, 1), (other, 0)):
        headers = bearer(session) if isinstance(session, str) else {}
        async with (http if headers else admin).get("/admin/audit", headers=headers) as response:
            assert len((await response.json())["data"]) == seen


async def test_tenants_admin_sees_acts_by_and_about_its_tenant_only(
    house: House, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret = new_key("acme", role=Role.TENANT_ADMIN)
    for tenant in ("acme", "globex"):
        async with admin.post(f"/admin/tenants/{tenant}/keys", json={}) as response:
            assert response.status == (201 if tenant == "acme" else 404)
    async with aiohttp.ClientSession(house.url, headers=bearer(secret)) as client:
        async with client.post("/admin/tenants/acme/keys", json={"label": "own"}) as response:
            assert response.status == 201
        assert {act["owner"] for act in await audit(client)} == {"acme"}
        assert len(await audit(client)) == 2
        assert await audit(client, tenant="globex") == []
    assert len(await audit(admin)) == 3
    assert len(await audit(admin, tenant="globex")) == 1


async def test_act_that_cannot_be_noted_is_not_answered_as_if_it_were(
    house: House, admin: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(act: object) -> None:
        raise AdapterUnavailableError("The audit log cannot be written at present.")

    monkeypatch.setattr(type(house.services.audit), "append", lambda self, act: fails(act))
    async with admin.post("/admin/tenants", json={"name": "acme"}) as response:
        assert response.status == 503
        assert "audit log" in (await response.json())["error"]["message"]


async def test_pages_go_on_where_the_last_one_ended(admin: aiohttp.ClientSession) -> None:
    for name in "abc":
        async with admin.post("/admin/tenants", json={"name": name}) as response:
            assert response.status == 201
    async with admin.get("/admin/audit?limit=2") as response:
        first = await response.json()
    async with admin.get(f"/admin/audit?limit=2&after={first['last_id']}") as response:
        second = await response.json()
    assert [act["subject"] for act in first["data"] + second["data"]] == ["c", "b", "a"]
    assert (first["has_more"], second["has_more"]) == (True, False)
    for query in ("after=1", "limit=0", "after=%00"):
        async with admin.get(f"/admin/audit?{query}") as response:
            assert response.status == 400
