"""How far a registration has come, who sees that, and the reasons of one that is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from safetensors.numpy import load_file, save_file

from lora_serve.server.admin import registration
from tests.server.admin.test_upload import form_of, put, tar_of
from tests.server.tenants import Tenancy, tenancy_of


@pytest.fixture
def auth_required() -> bool:
    return True


@pytest.fixture
async def tenancy(house: Any) -> AsyncIterator[Tenancy]:
    async with tenancy_of(house) as tenancy:
        await tenancy.tenant("acme")
        await tenancy.tenant("globex")
        yield tenancy


async def under_way(tenancy: Tenancy, key: str = "acme+") -> list[dict[str, Any]]:
    reply = await tenancy.call(key, "GET", "/admin/registrations")
    assert reply.status == 200
    rows: list[dict[str, Any]] = reply.data["data"]
    return rows


async def reached(tenancy: Tenancy, stage: str, key: str = "acme+") -> dict[str, Any]:
    """The one registration under way, once it is at a stage."""
    async with asyncio.timeout(60):
        while not (rows := [row for row in await under_way(tenancy, key) if row["stage"] == stage]):
            await asyncio.sleep(0.01)
    return rows[0]


class Steps:
    """Stands before a step of the verifier until the test lets it go on."""

    def __init__(self, house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gates = {name: threading.Event() for name in ("validate", "smoke_test")}
        for name, gate in self.gates.items():
            monkeypatch.setattr(house.verifier, name, self._behind(gate, getattr(house.verifier, name)))

    def _behind(self, gate: threading.Event, step: Any) -> Any:
        def wait(*args: Any, **named: Any) -> Any:
            assert gate.wait(60)
            return step(*args, **named)

        return wait


async def test_upload_shows_its_bytes_then_that_it_is_examined_then_probed(
    tenancy: Tenancy, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, more = tar_of(house.make_adapter("a")), asyncio.Event()
    steps = Steps(house, monkeypatch)

    async def chunks() -> AsyncIterator[bytes]:
        yield body[:1000]
        await more.wait()
        yield body[1000:]

    headers = {"Content-Length": str(len(body))}
    sent = asyncio.create_task(tenancy.call("acme+", "PUT", "/admin/adapters/a", data=chunks(), headers=headers))
    async with asyncio.timeout(60):
        while (await reached(tenancy, "receiving"))["bytes"] < 1000:
            await asyncio.sleep(0.01)
    (row,) = await under_way(tenancy)
    assert (row["id"], row["bytes"], row["total_bytes"]) == ("acme/a", 1000, len(body))
    assert await under_way(tenancy, "globex+") == []
    assert len(await under_way(tenancy, "admin")) == 1
    more.set()
    assert (await reached(tenancy, "examining"))["bytes"] == len(body)
    steps.gates["validate"].set()
    await reached(tenancy, "probing")
    steps.gates["smoke_test"].set()
    assert (await sent).status == 201
    assert await under_way(tenancy, "admin") == []


async def test_source_that_is_fetched_shows_so_and_what_ends_badly_is_gone(
    tenancy: Tenancy, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    fetch = house.services.staging._sources.fetch

    def slowly(source: str, target: Any, limit: int, progress: Any) -> str:
        progress(77)
        assert go.wait(60)
        return str(fetch(source, target, limit, progress))

    monkeypatch.setattr(house.services.staging._sources, "fetch", slowly)
    body = {"id": "acme/a", "source": str(house.root / "nothing")}
    sent = asyncio.create_task(tenancy.call("admin", "POST", "/admin/adapters", body))
    async with asyncio.timeout(60):
        while [row["bytes"] for row in await under_way(tenancy, "admin")] != [77]:
            await asyncio.sleep(0.01)
    (row,) = await under_way(tenancy, "admin")
    assert (row["stage"], row["total_bytes"]) == ("fetching", None)
    assert await under_way(tenancy) == []  # the operator's own registration, whatever the id
    go.set()
    assert (await sent).status == 400
    assert await under_way(tenancy, "admin") == []


@pytest.mark.parametrize("way", ["source", "upload", "vllm"])
async def test_registration_is_listed_to_its_end_although_its_client_has_left(
    tenancy: Tenancy, house: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    folder, steps, has_left = house.make_adapter("a"), Steps(house, monkeypatch), asyncio.Event()
    complete = house.services.background.complete

    async def noting(work: Any, name: str) -> Any:
        try:
            return await complete(work, name)
        except asyncio.CancelledError:
            has_left.set()
            raise

    monkeypatch.setattr(house.services.background, "complete", noting)
    if way == "upload":
        asking = tenancy.call("admin", "PUT", "/admin/adapters/acme/a", data=tar_of(folder))
    elif way == "source":
        asking = tenancy.call("admin", "POST", "/admin/adapters", {"id": "acme/a", "source": str(folder)})
    else:
        asking = tenancy.call(
            "admin", "POST", "/v1/load_lora_adapter", {"lora_name": "acme/a", "lora_path": str(folder)}
        )
    sent = asyncio.create_task(asking)
    assert (await reached(tenancy, "examining", "admin"))["id"] == "acme/a"
    sent.cancel()
    await asyncio.wait({sent})
    await asyncio.wait_for(has_left.wait(), 60)
    assert [row["stage"] for row in await under_way(tenancy, "admin")] == ["examining"]
    steps.gates["validate"].set()
    await reached(tenancy, "probing", "admin")
    steps.gates["smoke_test"].set()
    async with asyncio.timeout(60):
        while await under_way(tenancy, "admin"):
            await asyncio.sleep(0.01)
    assert (await tenancy.call("admin", "GET", "/admin/adapters/acme/a")).status == 200


async def test_refusal_begins_with_its_cause_and_names_tensors(admin: aiohttp.ClientSession, house: Any) -> None:
    folder = house.make_adapter("a")
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("q_proj", "quux_proj"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    status, answer = await put(admin, form_of(folder))
    assert status == 422
    reasons = answer["error"]["reasons"]
    assert "none of its tensors is named as a module of this base model" in reasons[0]
    assert sum(any(name in reason for reason in reasons) for name in renamed) == 3
    assert len(reasons) == 5
    assert reasons[4].endswith("more of the kind")
    assert all(reason in answer["error"]["message"] for reason in reasons)


async def test_tenant_is_listed_its_own_figures_and_no_foreign_name(tenancy: Tenancy, house: Any) -> None:
    await house.register("acme/own", seed=1)
    await house.register("globex/lent", seed=2, metadata={"secret": 1}, pin=True)
    await house.register("globex/secret", seed=3)
    assert (await tenancy.call("admin", "PUT", "/admin/adapters/globex/lent/sharing", {"shared_with": ["acme"]})).data
    for alias in ("acme/mine", "globex/theirs"):
        reply = await tenancy.call("admin", "PUT", f"/admin/aliases/{alias}", {"target": "globex/lent"})
        assert reply.status == 200
    for key, num in (("acme", 1), ("globex", 3)):
        for _ in range(num):
            assert (await tenancy.ask(key, "globex/lent")).status == 200
    listed = await tenancy.call("acme+", "GET", "/admin/adapters?fields=summary&sort=requests")
    assert [row["id"] for row in listed.data["data"]] == ["globex/lent", "acme/own"]
    row = listed.data["data"][0]
    assert (row["shared_with"], row["pinned"], row["aliases"], row["tiers"]) == (["acme"], False, ["acme/mine"], [])
    assert row["activity"]["requests"] == 1
    assert (await tenancy.call("acme+", "GET", "/admin/adapters/globex/lent")).data["activity"]["requests"] == 1
    assert (await tenancy.call("globex+", "GET", "/admin/adapters/lent")).data["activity"]["requests"] == 3
    assert (await tenancy.call("admin", "GET", "/admin/adapters/globex/lent")).data["activity"]["requests"] == 4
    for search in ("secret", "theirs"):
        reply = await tenancy.call("acme+", "GET", f"/admin/adapters?fields=summary&search={search}")
        assert (reply.data["data"], reply.data["total"]) == ([], 0)


async def test_tenant_made_again_is_not_shown_what_the_one_before_is_still_registering(
    tenancy: Tenancy, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(house, monkeypatch)
    form = form_of(house.make_adapter("a"))
    sent = asyncio.create_task(tenancy.call("acme+", "PUT", "/admin/adapters/secret-project", data=form))
    await reached(tenancy, "examining")
    assert (await tenancy.call("admin", "DELETE", "/admin/tenants/acme")).status == 200
    await tenancy.tenant("acme")
    assert await under_way(tenancy) == []
    assert len(await under_way(tenancy, "admin")) == 1
    for gate in steps.gates.values():
        gate.set()
    assert (await sent).status == 401


async def test_registration_that_is_deleted_before_its_answer_is_answered_all_the_same(
    tenancy: Tenancy, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: registered first, then deleted by another call."""
    pin = registration._pin

    async def delete(services: Any, registered: Any, was_pinned: bool) -> list[str]:
        await asyncio.to_thread(services.registry.delete, registered.entry.name, None)
        return await pin(services, registered, was_pinned)

    monkeypatch.setattr(registration, "_pin", delete)
    reply = await tenancy.call("acme+", "PUT", "/admin/adapters/a", data=tar_of(house.make_adapter("a")))
    assert (reply.status, reply.data["id"]) == (201, "acme/a")
    assert (await tenancy.call("acme+", "GET", "/admin/adapters/a")).status == 404
