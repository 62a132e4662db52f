"""What one tenant may learn of another: nothing. Each test looks at one way in which it could."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lora_serve.core.tenant import Caller, Role
from lora_serve.server.admin import registration
from lora_serve.server.inference.resolve import AdapterResolver
from tests.server.admin.test_upload import form_of
from tests.server.conftest import House
from tests.server.tenants import Reply, Tenancy, tenancy_of

BASE = "tiny-base"
# The same length everywhere, so that bodies can be compared byte by byte.
FOREIGN, UNKNOWN, DELETED = "globex/secret", "globex/nobody", "globex/erased"


@pytest.fixture
def auth_required() -> bool:
    return True


@pytest.fixture
async def tenancy(house: House) -> AsyncIterator[Tenancy]:
    """acme with acme/own, globex with globex/secret and, once, globex/erased."""
    async with tenancy_of(house) as tenancy:
        await tenancy.tenant("acme")
        await tenancy.tenant("globex")
        await house.register("acme/own", seed=1)
        await house.register(FOREIGN, seed=2)
        await house.register(DELETED, seed=3)
        await tenancy.call("admin", "DELETE", f"/admin/adapters/{DELETED}")
        yield tenancy


def normal(reply: Reply, name: str) -> tuple[int, bytes, list[tuple[str, str]]]:
    """All that the caller gets, but for the name it gave itself, the request's id and the time of day."""
    headers = [(k, v) for k, v in reply.headers.items() if k.lower() not in ("x-request-id", "date")]
    return reply.status, reply.body.replace(name.encode(), b"NAME"), headers


SURFACES: list[tuple[str, str, str, Any]] = [
    ("acme", "POST", "/v1/completions", {"model": "NAME", "prompt": "x", "max_tokens": 1}),
    ("acme", "POST", "/v1/completions", {"model": f"{BASE}:NAME", "prompt": "x", "max_tokens": 1}),
    ("acme", "POST", "/v1/completions", {"model": "NAME@1", "prompt": "x", "max_tokens": 1}),
    ("acme", "POST", "/v1/completions", {"adapter_id": "NAME", "prompt": "x", "max_tokens": 1}),
    ("acme", "POST", "/v1/completions", {"adapters": [{"id": "own"}, {"id": "NAME"}], "prompt": "x", "max_tokens": 1}),
    ("acme", "POST", "/v1/completions", {"model": "NAME", "prompt": "x", "stream": True}),
    ("acme", "POST", "/v1/completions", {"model": "NAME", "prompt": "x", "on_cold": "previous"}),
    ("acme", "POST", "/v1/chat/completions", {"model": "NAME", "messages": [{"role": "user", "content": "x"}]}),
    ("acme", "GET", "/v1/models/NAME", None),
    ("acme", "GET", "/v1/models/NAME@1", None),
    ("acme", "POST", "/tokenize", {"model": "NAME", "prompt": "x"}),
    ("acme", "POST", "/detokenize", {"model": "NAME", "tokens": [1]}),
    ("acme+", "GET", "/admin/adapters/NAME", None),
    ("acme+", "PUT", "/admin/adapters/NAME/route", {"version": 1}),
    ("acme+", "POST", "/admin/adapters/NAME/rollback", None),
    ("acme+", "POST", "/admin/adapters/NAME/pin", None),
    ("acme+", "POST", "/admin/adapters/NAME/unpin", None),
    ("acme+", "DELETE", "/admin/adapters/NAME", None),
    ("acme+", "DELETE", "/admin/adapters/NAME?version=1", None),
    ("acme+", "DELETE", "/v1/models/NAME", None),
    ("acme+", "DELETE", "/v1/models/NAME@1", None),
]


def with_name(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: with_name(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [with_name(item, name) for item in value]
    return value.replace("NAME", name) if isinstance(value, str) else value


@pytest.mark.parametrize(("key", "method", "path", "body"), SURFACES)
async def test_foreign_unknown_and_deleted_are_the_same_404_to_the_byte(
    tenancy: Tenancy, key: str, method: str, path: str, body: Any
) -> None:
    before = tenancy.house.services.catalog.snapshot.entries
    seen = []
    for name in (FOREIGN, UNKNOWN, DELETED):
        reply = await tenancy.call(key, method, path.replace("NAME", name), with_name(body, name))
        seen.append(normal(reply, name))
    assert seen[0][0] == 404
    assert b"model_not_found" in seen[0][1]
    assert seen[0] == seen[1] == seen[2]
    assert tenancy.house.services.catalog.snapshot.entries == before
    assert (await tenancy.ask("globex", FOREIGN)).status == 200


async def test_header_names_a_foreign_adapter_no_better(tenancy: Tenancy) -> None:
    seen = []
    for name in (FOREIGN, UNKNOWN, DELETED):
        body = {"prompt": "x", "max_tokens": 1}
        reply = await tenancy.call("acme", "POST", "/v1/completions", body, headers={"X-Adapter-Id": name})
        seen.append(normal(reply, name))
    assert seen[0][0] == 404
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    "name", [FOREIGN, f"{FOREIGN}@1", "acme/../globex/secret", "globex%2Fsecret", "//globex/secret"]
)
async def test_no_spelling_of_a_foreign_adapter_leads_to_it(tenancy: Tenancy, name: str) -> None:
    for key, path in (("acme", f"/v1/models/{name}"), ("acme+", f"/admin/adapters/{name}")):
        reply = await tenancy.call(key, "GET", path)
        assert reply.status in (400, 404)
        assert b"sha256" not in reply.body
    assert (await tenancy.ask("acme", name)).status in (400, 404)


async def test_foreign_and_unknown_take_the_same_time(tenancy: Tenancy) -> None:
    """Of the look-up itself, where a difference would begin. The shortest of many, taken in turns: load only adds."""
    services = tenancy.house.services
    resolver = AdapterResolver(services.catalog, BASE, Caller("acme", Role.INFERENCE), services.adapter_config)
    times: dict[str, list[int]] = {FOREIGN: [], UNKNOWN: [], DELETED: []}
    for _ in range(3000):
        for name, taken in times.items():
            started = time.perf_counter_ns()
            with pytest.raises(Exception, match="does not exist"):
                resolver.find(name)
            taken.append(time.perf_counter_ns() - started)
    shortest = [min(taken) for taken in times.values()]
    assert max(shortest) < 1.5 * min(shortest), shortest


@pytest.mark.parametrize(
    ("key", "method", "path", "body"), [SURFACES[0], ("acme+", "GET", "/admin/adapters/NAME", None)]
)
async def test_answers_for_foreign_and_unknown_take_the_same_time(
    tenancy: Tenancy, key: str, method: str, path: str, body: Any
) -> None:
    """Of whole answers over a socket. The shortest of many, taken in turns: load only adds."""
    times: dict[str, list[int]] = {FOREIGN: [], UNKNOWN: [], DELETED: []}
    for _ in range(200):
        for name, taken in times.items():
            started = time.perf_counter_ns()
            reply = await tenancy.call(key, method, path.replace("NAME", name), with_name(body, name))
            taken.append(time.perf_counter_ns() - started)
            assert reply.status == 404
    shortest = [min(taken) for taken in times.values()]
    assert max(shortest) < 1.25 * min(shortest), shortest


async def test_lists_hold_own_and_shared_adapters_only(tenancy: Tenancy) -> None:
    assert await tenancy.models("acme") == [BASE, "acme/own"]
    assert await tenancy.adapters("acme+") == ["acme/own"]
    assert (await tenancy.call("acme+", "GET", "/admin/adapters?tenant=globex")).data["data"] == []
    await tenancy.call("admin", "PUT", f"/admin/adapters/{FOREIGN}/sharing", {"shared_with": ["acme"]})
    assert await tenancy.models("acme") == [BASE, "acme/own", FOREIGN]
    assert await tenancy.adapters("acme+") == ["acme/own", FOREIGN]


async def test_shared_adapter_is_used_and_not_changed(tenancy: Tenancy) -> None:
    await tenancy.tenant("initech")
    path = f"/admin/adapters/{FOREIGN}/sharing"
    shared = await tenancy.call("admin", "PUT", path, {"shared_with": ["initech", "acme", "acme", "globex"]})
    assert shared.data["shared_with"] == ["acme", "initech"]
    assert (await tenancy.ask("acme", FOREIGN)).headers["X-Adapter-Id"] == FOREIGN
    for method, verb in (("DELETE", ""), ("PUT", "/route"), ("POST", "/rollback"), ("POST", "/pin")):
        body = {"version": 1} if verb == "/route" else None
        assert (await tenancy.call("acme+", method, f"/admin/adapters/{FOREIGN}{verb}", body)).status == 403
    assert (await tenancy.call("acme+", "DELETE", f"/v1/models/{FOREIGN}")).status == 403
    await tenancy.call("admin", "PUT", path, {"shared_with": []})
    assert (await tenancy.ask("acme", FOREIGN)).status == 404
    await tenancy.call("admin", "PUT", path, {"shared_with": ["*", "acme"]})
    assert (await tenancy.ask("initech", FOREIGN)).status == 200


async def test_card_of_a_shared_adapter_tells_what_it_takes_to_use_it(tenancy: Tenancy) -> None:
    services = tenancy.house.services
    await tenancy.tenant("initech")
    await tenancy.house.register(FOREIGN, seed=2, metadata={"customer": "Hank"})
    await services.edit(lambda: services.catalog.set_alias("initech/live", FOREIGN), "alias")
    body = {"shared_with": ["acme", "initech"]}
    await tenancy.call("admin", "PUT", f"/admin/adapters/{FOREIGN}/sharing", body)
    theirs = await tenancy.call("acme+", "GET", f"/admin/adapters/{FOREIGN}")
    assert theirs.data["shared_with"] == ["acme"]
    for hidden in (b"Hank", b"initech", b"folder", str(tenancy.house.root).encode()):
        assert hidden not in theirs.body
    own = await tenancy.call("globex+", "GET", "/admin/adapters/secret")
    assert own.data["metadata"] == {"customer": "Hank"}
    assert own.data["shared_with"] == ["acme", "initech"]


@pytest.mark.parametrize("shared_with", [None, "acme", [1], ["../x"], ["a/b"], [""], [f"t{n}" for n in range(1001)]])
async def test_wrong_sharing_is_refused(tenancy: Tenancy, shared_with: Any) -> None:
    body = {"shared_with": shared_with}
    assert (await tenancy.call("admin", "PUT", f"/admin/adapters/{FOREIGN}/sharing", body)).status == 400


async def test_key_of_the_role_metrics_reads_all_names_there_and_nothing_else(tenancy: Tenancy) -> None:
    """What an endpoint picker that routes by adapter needs; vllm:lora_requests_info is empty for others."""
    tenancy.secrets["scraper"] = await tenancy.key("acme", role="metrics")
    assert (await tenancy.ask("globex", "secret")).status == 200  # it is on the device now
    seen = {key: (await tenancy.call(key, "GET", "/metrics")).body for key in ("scraper", "admin", "acme+", None)}
    assert [b'running_lora_adapters="globex/secret"' in seen[key] for key in seen] == [True, True, False, False]
    assert (await tenancy.ask("scraper", "own")).status == 403
    for path in ("/v1/models", "/admin/adapters", "/admin/usage", "/admin/engine", "/admin/fleet"):
        assert (await tenancy.call("scraper", "GET", path)).status == 403
    made = await tenancy.call("acme+", "POST", "/admin/tenants/acme/keys", {"role": "metrics"})
    assert made.status == 403, "a tenant's own admin would read all tenants' names"
    assert (await tenancy.call("scraper", "GET", "/admin/whoami")).data["role"] == "metrics"


async def test_sharing_with_nobody_known_is_refused(tenancy: Tenancy) -> None:
    path = f"/admin/adapters/{FOREIGN}/sharing"
    refused = await tenancy.call("admin", "PUT", path, {"shared_with": ["acme", "acmee"]})
    assert (refused.status, refused.data["error"]["param"], "`acmee`" in refused.message) == (400, "shared_with", True)
    assert (await tenancy.call("admin", "GET", f"/admin/adapters/{FOREIGN}")).data["shared_with"] == []


async def test_bare_name_is_the_tenants_own_before_anybody_elses(tenancy: Tenancy) -> None:
    own = await tenancy.house.register("acme/support", seed=4)
    common = await tenancy.house.register("support", seed=5)
    await tenancy.call("admin", "PUT", "/admin/adapters/support/sharing", {"shared_with": ["*"]})
    assert (await tenancy.ask("acme", "support")).headers["X-Adapter-Digest"] == own.digest
    assert (await tenancy.ask("globex", "support")).headers["X-Adapter-Digest"] == common.digest
    assert (await tenancy.ask("admin", "support")).headers["X-Adapter-Digest"] == common.digest


async def test_version_of_a_shared_adapter_deletes_no_own_one_of_the_same_short_name(tenancy: Tenancy) -> None:
    shared = await tenancy.house.register("own", seed=7, tenant="globex")
    await tenancy.call("admin", "PUT", "/admin/adapters/own/sharing", {"shared_with": ["*"]})
    assert (await tenancy.ask("acme", f"own@{shared.digest}")).status == 200
    assert (await tenancy.call("acme+", "DELETE", f"/v1/models/own@{shared.digest}")).status == 404
    assert (await tenancy.call("acme+", "DELETE", "/v1/models/acme/own@2")).status == 404
    assert await tenancy.models("acme") == [BASE, "acme/own", "own"]
    assert (await tenancy.call("acme+", "DELETE", "/v1/models/own@1")).status == 200
    assert await tenancy.models("acme") == [BASE, "own"]


async def test_base_model_is_a_permission(tenancy: Tenancy) -> None:
    await tenancy.call("admin", "PATCH", "/admin/tenants/acme", {"may_use_base": False})
    assert await tenancy.models("acme") == ["acme/own"]
    named, unknown = await tenancy.ask("acme", BASE), await tenancy.ask("acme", "tiny-bass")
    assert normal(named, BASE) == normal(unknown, "tiny-bass")
    for fields in (
        {},
        {"adapter_id": BASE},
        {"model": "own", "adapter_id": BASE},
        {"adapters": [{"id": "own", "scale": 0.0}]},
        {"adapters": [{"id": BASE}]},
    ):
        assert (await tenancy.ask("acme", **{"model": None, **fields})).status == 404, fields
    assert (await tenancy.call("acme", "GET", f"/v1/models/{BASE}")).status == 404
    assert (await tenancy.call("acme", "POST", "/tokenize", {"model": BASE, "prompt": "x"})).status == 404
    refused = await tenancy.ask("acme", "own", on_cold="base")
    assert (refused.status, refused.data["error"]["param"]) == (400, "on_cold")
    for model in ("own", "acme/own", f"{BASE}:own"):
        assert (await tenancy.ask("acme", model)).status == 200
    assert (await tenancy.ask("acme", BASE, adapter_id="own")).headers["X-Adapter-Id"] == "acme/own"
    assert (await tenancy.ask("globex", BASE)).status == 200


async def test_same_bytes_as_another_tenants_show_nowhere(tenancy: Tenancy) -> None:
    """The first tenant to upload some content and the second get the same answer, whatever was done with it."""
    cards = []
    for tenant in ("acme", "globex"):
        folder = tenancy.house.make_adapter("same", seed=77)
        made = await tenancy.call(f"{tenant}+", "PUT", "/admin/adapters/same", data=form_of(folder))
        assert made.status == 201
        cards.append(made.data)
        await tenancy.ask(tenant, "same")  # it is on the device when the second one comes
        listed = await tenancy.call(f"{tenant}+", "GET", "/admin/adapters/same")
        own = ("created", "versions", "activity")  # the last: of the tenant's one request
        assert listed.data == made.data | {name: listed.data[name] for name in own}
        assert listed.data["activity"]["requests"] == 1
    hide = {"id": "", "tenant": "", "created": 0, "versions": []}
    assert cards[0] | hide == cards[1] | hide
    versions = [card["versions"][0] | {"created": 0} for card in cards]
    assert versions[0] == versions[1]
    gone = await tenancy.call("acme+", "DELETE", "/admin/adapters/same")
    assert gone.status == 200
    assert (await tenancy.ask("globex", "same")).status == 200
    assert "globex" not in (await tenancy.call("acme+", "GET", "/admin/tenants/acme")).body.decode()


async def test_deleted_tenant_takes_everything_along(tenancy: Tenancy) -> None:
    services = tenancy.house.services
    await tenancy.tenant("initech")
    ref = await tenancy.house.register("globex/more", seed=9)
    await services.edit(lambda: services.catalog.set_alias("globex/live", "globex/more"), "alias")
    await tenancy.call("admin", "PUT", "/admin/adapters/acme/own/sharing", {"shared_with": ["globex", "initech"]})
    assert (await tenancy.ask("globex", "more")).status == 200
    gone = await tenancy.call("admin", "DELETE", "/admin/tenants/globex")
    assert gone.data == {
        "name": "globex", "object": "tenant", "deleted": True, "adapters": ["globex/more", FOREIGN],
    }  # fmt: skip
    for key in ("globex", "globex+"):
        assert (await tenancy.ask(key, "more")).status == 401
    assert (await tenancy.ask("admin", "globex/more")).status == 404
    assert services.catalog.snapshot.aliases == {}
    assert services.catalog.snapshot.entries["acme/own"].shared_with == ("initech",)
    assert (await tenancy.ask("acme", "own")).status == 200
    await services.background.close()
    digest = ref.digest.removeprefix("sha256:").encode()
    secrets = [tenancy.secrets[key][3:15].encode() for key in ("globex", "globex+")]
    for path in tenancy.house.store.rglob("*"):
        found = [word for word in (digest, b"globex/more", *secrets) if word in path.name.encode() or (
            path.is_file() and word in path.read_bytes())]  # fmt: skip
        assert not found, (path, found)
    for path, status in (("/admin/tenants/globex", 404), ("/admin/tenants/hooli", 404)):
        assert (await tenancy.call("admin", "DELETE", path)).status == status


async def test_deletion_that_a_crash_broke_off_is_completed_by_the_same_call(tenancy: Tenancy) -> None:
    tenancy.house.services.keys.directory.delete_tenant("globex")  # and then it crashed
    assert (await tenancy.ask("admin", FOREIGN)).status == 200
    assert (await tenancy.call("admin", "DELETE", "/admin/tenants/globex")).data["adapters"] == [FOREIGN]
    assert (await tenancy.ask("admin", FOREIGN)).status == 404


async def test_registration_that_ends_after_its_tenant_leaves_nothing(
    tenancy: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenant is deleted while the upload runs: at another replica, so that this one does not know."""
    services, really = tenancy.house.services, registration.check_still_there

    async def deleted_meanwhile(*given: Any) -> None:
        services.keys.directory.delete_tenant("acme")
        await really(*given)

    monkeypatch.setattr("lora_serve.server.admin.registration.check_still_there", deleted_meanwhile)
    folder = tenancy.house.make_adapter("late", seed=8)
    late = await tenancy.call("acme+", "PUT", "/admin/adapters/late", data=form_of(folder))
    assert late.status == 401
    assert "acme/late" not in services.catalog.snapshot.entries


async def test_requests_of_a_tenant_stand_under_its_name_whatever_they_say(tenancy: Tenancy) -> None:
    """Prefix caches, queues and shares go by it."""
    await tenancy.ask("acme", "own", tenant="globex", user="globex", account="globex")
    await tenancy.call(
        "acme", "POST", "/v1/completions", {"model": "own", "prompt": "x"}, headers={"X-Tenant": "globex"}
    )
    for request in tenancy.house.engine.requests[-2:]:
        assert (request.tenant, request.account) == ("acme", "acme")


async def test_tenant_made_again_finds_no_kv_block_of_the_one_before(tenancy: Tenancy) -> None:
    await tenancy.ask("acme", BASE)
    before = tenancy.house.engine.requests[-1]
    await tenancy.ask("acme", BASE)
    assert tenancy.house.engine.requests[-1].cache_scope == before.cache_scope
    await tenancy.call("admin", "DELETE", "/admin/tenants/acme")
    await tenancy.tenant("acme")
    await tenancy.ask("acme", BASE)
    after = tenancy.house.engine.requests[-1]
    assert before.tenant == after.tenant == "acme"
    assert before.cache_scope != after.cache_scope
