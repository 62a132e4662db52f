"""Tenants, keys and roles over the wire."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from lora_serve.core.tenant import TENANT_LIMITS
from lora_serve.server import upkeep
from lora_serve.server.admin.protocol import KeyQuotaFields, QuotaFields
from lora_serve.server.route import Access
from lora_serve.server.routes import TABLE
from lora_serve.server.schemas.fields import marked
from tests.server.admin.test_upload import form_of
from tests.server.conftest import House
from tests.server.tenants import Tenancy, tenancy_of

BASE = "tiny-base"


@pytest.fixture
def auth_required() -> bool:
    return True


@pytest.fixture
async def tenancy(house: House) -> AsyncIterator[Tenancy]:
    async with tenancy_of(house) as tenancy:
        yield tenancy


async def test_tenant_is_made_shown_changed_and_listed(tenancy: Tenancy) -> None:
    made = await tenancy.call("admin", "POST", "/admin/tenants", {"name": "acme", "quota": {"max_running": 4}})
    assert made.status == 201
    assert made.data | {"created": 0} == {
        "name": "acme", "object": "tenant", "may_use_base": True, "offload": True, "quota": {"max_running": 4},
        "created": 0, "num_keys": 0, "num_adapters": 0,
    }  # fmt: skip
    await tenancy.house.register("acme/a")
    await tenancy.key("acme")
    change = {"may_use_base": False, "quota": {"max_running": None, "max_stored_bytes": "2MiB", "max_adapters": 0}}
    changed = await tenancy.call("admin", "PATCH", "/admin/tenants/acme", change)
    assert changed.data["quota"] == {"max_stored_bytes": 2 * 2**20, "max_adapters": 0}
    shown = await tenancy.call("admin", "GET", "/admin/tenants/acme")
    assert shown.data == changed.data
    assert (shown.data["num_keys"], shown.data["num_adapters"], shown.data["may_use_base"]) == (1, 1, False)
    await tenancy.call("admin", "POST", "/admin/tenants", {"name": "globex"})
    page = (await tenancy.call("admin", "GET", "/admin/tenants?limit=1")).data
    assert ([card["name"] for card in page["data"]], page["has_more"], page["last_id"]) == (["acme"], True, "acme")
    page = (await tenancy.call("admin", "GET", "/admin/tenants?after=acme")).data
    assert ([card["name"] for card in page["data"]], page["has_more"]) == (["globex"], False)


@pytest.mark.many(6)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"name": ""}, 400),
        ({"name": "../etc"}, 400),
        ({"name": "a/b"}, 400),
        ({"name": "a..b"}, 400),
        ({"name": "*"}, 400),
        ({"name": "admin"}, 400),
        ({"name": "a" * 129}, 400),
        ({"name": "acm\u00e9"}, 400),
        ({"name": "acme\n"}, 400),
        ({"name": 5}, 400),
        ({"name": "x", "may_use_base": "yes"}, 400),
        ({"name": "x", "quota": {"max_running": -1}}, 400),
        ({"name": "x", "quota": {"max_running": 1.5}}, 400),
        ({"name": "x", "quota": {"max_running": True}}, 400),
        ({"name": "x", "quota": {"max_stored_bytes": "many"}}, 400),
        ({"name": "x", "quota": [1]}, 400),
        ({"name": "x", "quota": {"max_runing": 1}}, 400),  # it would be no limit
        ({"name": "there"}, 409),
    ],
)
async def test_wrong_tenants_are_refused(tenancy: Tenancy, body: dict[str, Any], status: int) -> None:
    await tenancy.call("admin", "POST", "/admin/tenants", {"name": "there"})
    assert (await tenancy.call("admin", "POST", "/admin/tenants", body)).status == status


@pytest.mark.many(6)
@pytest.mark.parametrize(
    "body",
    [
        {"role": "root"},
        {"role": 1},
        {"label": "x" * 201},
        {"expires_in": 0},
        {"expires_in": 10**12},
        {"expires_in": "1d"},
        {"quota": {"max_queued": "x"}},
        {"quota": {"max_adapters": 1}},  # of all of a tenant's keys together, so not of one
        {"quota": {"max_stored_bytes": "1MiB"}},
        {"quota": {"device_bytes_guaranteed": 0}},
        {"quota": {"device_bytes_max": 1}},
    ],
)
async def test_wrong_keys_are_refused(tenancy: Tenancy, body: dict[str, Any]) -> None:
    await tenancy.tenant("acme")
    assert (await tenancy.call("admin", "POST", "/admin/tenants/acme/keys", body)).status == 400
    assert len((await tenancy.call("admin", "GET", "/admin/tenants/acme/keys")).data["data"]) == 2


def test_limits_of_tenants_alone_are_one_list() -> None:
    assert set(marked(KeyQuotaFields.model_fields)) == TENANT_LIMITS
    assert not marked(QuotaFields.model_fields)


async def test_key_has_the_limits_that_it_can_have(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    quota = {"requests_per_minute": 1, "tokens_per_minute": 2, "max_running": 3, "max_queued": 4}
    quota["registrations_per_minute"] = 5
    body = {"quota": {**quota, "max_adapters": None}}
    made = await tenancy.call("admin", "POST", "/admin/tenants/acme/keys", body)
    assert (made.status, made.data["quota"]) == (201, quota)
    refused = await tenancy.call("admin", "POST", "/admin/tenants/acme/keys", {"quota": {"max_adapters": 1}})
    assert "limit of the whole tenant" in refused.data["error"]["message"]


async def test_secret_is_shown_once_and_never_again(tenancy: Tenancy, caplog: pytest.LogCaptureFixture) -> None:
    await tenancy.tenant("acme")
    body = {"label": "ci", "expires_in": 60}
    made = await tenancy.call("admin", "POST", "/admin/tenants/acme/keys", body)
    secret = made.data["secret"]
    assert re.fullmatch(r"ls-[a-z0-9]{12}-[A-Za-z0-9_-]{43}", secret)
    assert made.headers["Cache-Control"] == "no-store"
    assert made.data["expires"] == made.data["created"] + 60
    random_part = secret[16:].encode()
    await tenancy.ask(secret, BASE)
    for path in ("/admin/tenants", "/admin/tenants/acme", "/admin/tenants/acme/keys", "/admin/whoami", "/metrics"):
        assert random_part not in (await tenancy.call("admin", "GET", path)).body
    listed = (await tenancy.call("admin", "GET", "/admin/tenants/acme/keys")).data["data"][-1]
    assert listed | {"last_used": 0} == {k: v for k, v in made.data.items() if k != "secret"} | {"last_used": 0}
    assert listed["last_used"] >= listed["created"]
    assert random_part.decode() not in caplog.text
    assert not any(random_part in path.read_bytes() for path in tenancy.house.store.rglob("*") if path.is_file())


async def test_revoked_key_is_refused_at_once(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    assert (await tenancy.ask("acme", BASE)).status == 200
    key_id = tenancy.secrets["acme"][3:15]
    revoked = await tenancy.call("admin", "DELETE", f"/admin/tenants/acme/keys/{key_id}")
    assert revoked.status == 200
    assert not revoked.data["active"]
    refused = await tenancy.ask("acme", BASE)
    assert (refused.status, refused.data["error"]["code"]) == (401, "invalid_api_key")
    again = await tenancy.call("admin", "DELETE", f"/admin/tenants/acme/keys/{key_id}")
    assert again.data["revoked"] == revoked.data["revoked"]


async def test_inference_needs_a_key_and_the_admin_key_will_do(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    assert [(await tenancy.ask(key, BASE)).status for key in (None, "nonsense", "acme", "acme+", "admin")] == [
        401, 401, 200, 200, 200,
    ]  # fmt: skip


OPERATORS = {  # what no tenant's own admin may do
    "POST /admin/tenants",
    "PATCH /admin/tenants/{tenant}",
    "DELETE /admin/tenants/{tenant}",
    "PUT /admin/adapters/{id}/sharing",
    "POST /admin/adapters/{id}/prefetch",
    "POST /admin/adapters/{id}/evict",
    "GET /admin/aliases",
    "PUT /admin/aliases/{id}",
    "DELETE /admin/aliases/{id}",
    "GET /admin/engine",
    "PUT /admin/engine",
    "GET /admin/engine/health",
    "GET /admin/fleet",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
}


def calls(access: Access) -> list[tuple[str, str]]:
    """Method and path of the routes, about the tenant `acme` and its adapter."""
    return [
        (route.method, route.path.format(id="acme/a", tenant="acme", key="aaaaaaaaaaaa"))
        for route in TABLE.routes
        if route.access is access
    ]


def test_no_more_and_no_less_is_the_operators() -> None:
    found = {f"{route.method} {route.path}" for route in TABLE.routes if route.access is Access.ADMIN}
    assert found == OPERATORS


def test_every_admin_route_asks_for_an_admin() -> None:
    """So that a new route is thought of."""
    for route in TABLE.routes:
        if route.path.startswith("/admin") or route.method == "DELETE" or "lora_adapter" in route.path:
            assert route.access in (Access.ADMIN, Access.TENANT_ADMIN) or route.path == "/admin/whoami", route


@pytest.mark.parametrize(("method", "path"), calls(Access.ADMIN))
async def test_what_is_the_operators_is_refused_to_tenants(tenancy: Tenancy, method: str, path: str) -> None:
    await tenancy.tenant("acme")
    await tenancy.house.register("acme/a")
    before = tenancy.house.services.catalog.snapshot, tenancy.house.services.keys.directory.snapshot
    for key in ("acme", "acme+"):
        refused = await tenancy.call(key, method, path, {})
        assert (refused.status, refused.data["error"]["code"]) == (403, "forbidden"), key
    assert (await tenancy.call(None, method, path, {})).status == 401
    assert before == (tenancy.house.services.catalog.snapshot, tenancy.house.services.keys.directory.snapshot)


@pytest.mark.parametrize(("method", "path"), calls(Access.TENANT_ADMIN))
async def test_key_for_inference_manages_nothing(tenancy: Tenancy, method: str, path: str) -> None:
    await tenancy.tenant("acme")
    await tenancy.house.register("acme/a")
    before = tenancy.house.services.catalog.snapshot, tenancy.house.services.keys.directory.snapshot
    refused = await tenancy.call("acme", method, path, {})
    assert (refused.status, refused.data["error"]["code"]) == (403, "forbidden")
    assert before == (tenancy.house.services.catalog.snapshot, tenancy.house.services.keys.directory.snapshot)


async def test_tenants_own_admin_makes_lists_and_revokes_its_keys(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    made = await tenancy.call("acme+", "POST", "/admin/tenants/acme/keys", {"role": "tenant-admin", "label": "mine"})
    assert made.status == 201
    tenancy.secrets["second+"] = made.data["secret"]
    listed = (await tenancy.call("second+", "GET", "/admin/tenants/acme/keys")).data["data"]
    assert [card["label"] for card in listed] == ["", "", "mine"]
    gone = await tenancy.call("second+", "DELETE", f"/admin/tenants/acme/keys/{tenancy.secrets['acme'][3:15]}")
    assert gone.status == 200
    assert (await tenancy.ask("acme", BASE)).status == 401


async def test_nobody_gives_away_a_role_above_its_own(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    refused = await tenancy.call("acme+", "POST", "/admin/tenants/acme/keys", {"role": "admin"})
    assert refused.status == 403
    made = await tenancy.call("admin", "POST", "/admin/tenants/acme/keys", {"role": "admin"})
    assert made.status == 201
    assert (await tenancy.call(made.data["secret"], "GET", "/admin/engine")).status == 200


async def test_nobody_revokes_a_key_of_a_role_above_its_own(tenancy: Tenancy) -> None:
    """An operator's own key stands under a tenant too."""
    await tenancy.tenant("acme")
    secret = await tenancy.key("acme", role="admin")
    path = f"/admin/tenants/acme/keys/{secret[3:15]}"
    assert (await tenancy.call("acme+", "DELETE", path)).status == 403
    assert (await tenancy.call(secret, "GET", "/admin/engine")).status == 200
    assert (await tenancy.call(secret, "DELETE", path)).status == 200


async def test_other_tenants_and_their_keys_do_not_exist(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    await tenancy.tenant("globex")
    theirs = tenancy.secrets["globex"][3:15]
    for method, path in (
        ("GET", "/admin/tenants/{}"),
        ("GET", "/admin/tenants/{}/keys"),
        ("POST", "/admin/tenants/{}/keys"),
        ("DELETE", "/admin/tenants/{}/keys/" + theirs),
    ):
        body = {} if method == "POST" else None
        foreign, unknown = [await tenancy.call("acme+", method, path.format(t), body) for t in ("globex", "initec")]
        assert foreign.status == unknown.status == 404
        assert foreign.body.replace(b"globex", b"initec") == unknown.body
    foreign, unknown = [
        await tenancy.call("acme+", "DELETE", f"/admin/tenants/acme/keys/{key}") for key in (theirs, "a" * 12)
    ]
    assert foreign.body.replace(theirs.encode(), b"a" * 12) == unknown.body
    assert [card["name"] for card in (await tenancy.call("acme+", "GET", "/admin/tenants")).data["data"]] == ["acme"]
    assert (await tenancy.ask("globex", BASE)).status == 200


async def test_whoami_tells_whose_key_it_is(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme", quota={"max_running": 2}, may_use_base=False)
    found = (await tenancy.call("acme", "GET", "/admin/whoami")).data
    assert found == {
        "object": "caller", "tenant": "acme", "role": "inference", "key_id": tenancy.secrets["acme"][3:15],
        "may_use_base": False, "quota": {"max_running": 2}, "key_quota": {}, "has_neighbours": False,
    }  # fmt: skip
    assert (await tenancy.call("admin", "GET", "/admin/whoami")).data["role"] == "admin"
    assert (await tenancy.call(None, "GET", "/admin/whoami")).status == 401


async def test_tenant_registers_routes_and_deletes_in_its_own_namespace(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    for seed in (1, 2):
        folder = tenancy.house.make_adapter("a", seed)
        made = await tenancy.call("acme+", "PUT", "/admin/adapters/support", data=form_of(folder))
        assert (made.status, made.data["id"], made.data["tenant"]) == (201, "acme/support", "acme")
    again = await tenancy.call("acme+", "PUT", "/admin/adapters/acme/support", data=form_of(folder))
    assert (again.status, again.data["version"]) == (200, 2)
    foreign = await tenancy.call("acme+", "PUT", "/admin/adapters/globex/x", data=form_of(folder))
    assert foreign.data["id"] == "acme/globex/x"
    for name in ("support", "acme/support"):
        answer = await tenancy.ask("acme", name)
        assert (answer.headers["X-Adapter-Id"], answer.headers["X-Adapter-Version"]) == ("acme/support", "2")
    assert (await tenancy.ask("acme", f"{BASE}:support@1")).headers["X-Adapter-Version"] == "1"
    routed = await tenancy.call("acme+", "PUT", "/admin/adapters/support/route", {"version": 1})
    assert routed.data["version"] == 1
    assert (await tenancy.call("acme+", "POST", "/admin/adapters/support/rollback")).data["version"] == 2
    assert await tenancy.adapters("acme+") == ["acme/globex/x", "acme/support"]
    assert (await tenancy.call("acme+", "DELETE", "/admin/adapters/support?version=1")).status == 200
    assert (await tenancy.call("acme+", "DELETE", "/v1/models/support")).status == 200
    assert (await tenancy.ask("acme", "support")).status == 404


async def test_tenant_registers_for_nobody_else(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    folder = tenancy.house.make_adapter("a")
    refused = await tenancy.call("acme+", "PUT", "/admin/adapters/x?tenant=globex", data=form_of(folder))
    assert refused.status == 403
    refused = await tenancy.call("acme+", "PUT", "/admin/adapters/x", data=form_of(folder, tenant="globex"))
    assert refused.status == 403
    await tenancy.house.register("acme/theirs", tenant="globex")
    refused = await tenancy.call("acme+", "PUT", "/admin/adapters/theirs", data=form_of(folder))
    assert (refused.status, refused.message) == (409, "The id `acme/theirs` is taken.")
    assert "globex" not in json.dumps(refused.data)


@pytest.mark.parametrize("source", ["FOLDER", "redis://acme", "hf://org/name", "https://example.org/a.tar"])
async def test_tenant_registers_from_no_source_that_the_operator_did_not_allow(tenancy: Tenancy, source: str) -> None:
    await tenancy.tenant("acme")
    folder = tenancy.house.make_adapter("a")
    body = {"id": "x", "source": source.replace("FOLDER", str(folder))}
    refused = await tenancy.call("acme+", "POST", "/admin/adapters", body)
    assert refused.status == 403
    assert "upload" in refused.message


async def test_tenant_pins_within_what_is_guaranteed_to_it(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    refs = [await tenancy.house.register(f"acme/{name}", seed) for seed, name in enumerate("ab")]
    assert (await tenancy.call("acme+", "POST", "/admin/adapters/a/pin")).status == 403
    quota = {"device_bytes_guaranteed": refs[0].num_bytes}
    await tenancy.call("admin", "PATCH", "/admin/tenants/acme", {"quota": quota})
    pinned = await tenancy.call("acme+", "POST", "/admin/adapters/a/pin")
    assert (pinned.status, pinned.data["pinned"]) == (200, True)
    refused = await tenancy.call("acme+", "POST", "/admin/adapters/b/pin")
    assert refused.status == 403
    assert str(sum(ref.num_bytes for ref in refs)) in refused.message
    assert (await tenancy.call("acme+", "POST", "/admin/adapters/a/unpin")).status == 200
    assert (await tenancy.call("acme+", "POST", "/admin/adapters/b/pin")).status == 200


async def test_pins_that_are_asked_for_at_once_stay_within_what_is_guaranteed(tenancy: Tenancy) -> None:
    """Each alone would fit."""
    refs = [await tenancy.house.register(f"acme/{name}", seed) for seed, name in enumerate("abcd")]
    await tenancy.tenant("acme", quota={"device_bytes_guaranteed": 2 * refs[0].num_bytes})
    pins = [tenancy.call("acme+", "POST", f"/admin/adapters/{name}/pin") for name in "abcd"]
    assert sorted(reply.status for reply in await asyncio.gather(*pins)) == [200, 200, 403, 403]
    entries = tenancy.house.services.catalog.snapshot.entries.values()
    assert sum(entry.pinned for entry in entries) == 2


async def test_uses_are_written_down_in_batches_and_at_the_end(
    tenancy: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tenancy.tenant("acme")
    directory, keys = tenancy.house.services.keys.directory, tenancy.house.services.keys
    before = directory.snapshot.position.generation
    await asyncio.gather(*(tenancy.ask("acme", BASE) for _ in range(20)))
    assert directory.snapshot.position.generation == before
    await upkeep.write_uses(keys)
    assert directory.snapshot.position.generation == before + 1
    assert directory.snapshot.last_used(tenancy.secrets["acme"][3:15]) is not None


async def test_openai_client_speaks_with_a_tenants_key(tenancy: Tenancy) -> None:
    await tenancy.tenant("acme")
    await tenancy.tenant("globex")
    await tenancy.house.register("acme/a", seed=1)
    await tenancy.house.register("globex/b", seed=2)

    async def client(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{tenancy.house.url}/v1", api_key=key, max_retries=0)

    async with await client(tenancy.secrets["acme"]) as acme:
        assert [model.id async for model in await acme.models.list()] == [BASE, "acme/a"]
        answer = await acme.completions.create(model="a", prompt="x", max_tokens=1)
        assert answer.model == "acme/a"
        with pytest.raises(openai.NotFoundError):
            await acme.completions.create(model="globex/b", prompt="x", max_tokens=1)
        with pytest.raises(openai.PermissionDeniedError):
            await acme.models.delete("acme/a")
    async with await client("ls-" + "a" * 12 + "-" + "A" * 43) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
