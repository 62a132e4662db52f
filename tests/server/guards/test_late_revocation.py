"""Keys and tenants that end while one of their requests is under way: what was begun before opens nothing after."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from lora_serve.core.errors import AuthenticationError
from lora_serve.core.tenant import Role
from tests.server.admin.test_upload import form_of
from tests.server.conftest import House
from tests.server.tenants import Tenancy, tenancy_of


@pytest.fixture
def auth_required() -> bool:
    return True


@pytest.fixture
async def tenancy(house: House) -> AsyncIterator[Tenancy]:
    async with tenancy_of(house) as tenancy:
        await tenancy.tenant("acme")
        await house.register("acme/own", seed=1)
        yield tenancy


def slowly(body: bytes, act: Callable[[], Awaitable[Any]]) -> AsyncIterator[bytes]:
    """The body in two halves, `act` done between them, once the server has the first one."""

    async def halves() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        await act()
        yield body[len(body) // 2 :]

    return halves()


async def revoke(tenancy: Tenancy, name: str) -> None:
    key_id = tenancy.secrets[name][3:15]
    assert (await tenancy.call("admin", "DELETE", f"/admin/tenants/acme/keys/{key_id}")).status == 200


@pytest.mark.parametrize(
    ("key", "method", "path", "body"),
    [
        ("acme+", "POST", "/admin/tenants/acme/keys", {"role": "tenant-admin"}),
        ("acme+", "PUT", "/admin/adapters/acme/own/route", {"version": 1}),
        ("acme", "POST", "/v1/completions", {"model": "own", "prompt": "x", "max_tokens": 1}),
        ("acme", "POST", "/tokenize", {"prompt": "x"}),
    ],
)
async def test_request_that_was_half_sent_when_its_key_was_revoked_is_refused(
    tenancy: Tenancy, key: str, method: str, path: str, body: Any
) -> None:
    before = set(tenancy.house.services.keys.directory.snapshot.keys)
    data = slowly(json.dumps(body).encode(), lambda: revoke(tenancy, key))
    late = await tenancy.call(key, method, path, data=data, headers={"Content-Type": "application/json"})
    assert late.status == 401, late.body
    assert set(tenancy.house.services.keys.directory.snapshot.keys) == before
    assert tenancy.house.engine.requests == []


async def test_upload_that_was_half_sent_when_its_key_was_revoked_leaves_nothing(tenancy: Tenancy) -> None:
    form = form_of(tenancy.house.make_adapter("late", seed=8))()
    raw = await form.as_bytes()
    data = slowly(raw, lambda: revoke(tenancy, "acme+"))
    late = await tenancy.call("acme+", "PUT", "/admin/adapters/late", data=data, headers=dict(form.headers))
    assert late.status == 401, late.body
    assert list(tenancy.house.services.catalog.snapshot.entries) == ["acme/own"]


async def test_key_that_was_revoked_at_another_replica_makes_no_other_one(tenancy: Tenancy) -> None:
    """This one has authenticated it before it heard: the commit is where all replicas meet."""
    directory, maker = tenancy.house.services.keys.directory, tenancy.secrets["acme+"][3:15]
    directory.revoke_key("acme", maker)
    for gone in (maker, "0" * 12):
        with pytest.raises(AuthenticationError):
            directory.create_key("acme", Role.TENANT_ADMIN, maker=gone)


async def test_registration_whose_client_left_and_whose_tenant_was_deleted_leaves_nothing(
    tenancy: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, arrived, go_on = tenancy.house.services, asyncio.Event(), asyncio.Event()
    folder, run = tenancy.house.make_adapter("late", seed=8), services.registrations.run

    async def held(*call: Any) -> Any:
        arrived.set()
        await go_on.wait()
        return await run(*call)

    monkeypatch.setattr(services.registrations, "run", held)
    upload = asyncio.ensure_future(tenancy.call("acme+", "PUT", "/admin/adapters/late", data=form_of(folder)))
    await arrived.wait()
    upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)
    assert (await tenancy.call("admin", "DELETE", "/admin/tenants/acme")).status == 200
    go_on.set()
    await services.background.close(60)
    assert services.catalog.snapshot.entries == {}


async def test_registration_that_ends_after_its_tenant_was_made_again_is_not_the_new_ones(
    tenancy: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, stage = tenancy.house.services, tenancy.house.services.registry.register

    def late(*given: Any, **named: Any) -> Any:
        services.keys.directory.delete_tenant("acme")
        services.catalog.remove_tenant("acme")
        services.keys.directory.create_tenant("acme")
        return stage(*given, **named)

    monkeypatch.setattr(services.registry, "register", late)
    folder = tenancy.house.make_adapter("late", seed=8)
    assert (await tenancy.call("acme+", "PUT", "/admin/adapters/late", data=form_of(folder))).status == 401
    assert services.catalog.snapshot.entries == {}
