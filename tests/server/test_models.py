"""/v1/models"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, NotFoundError

from lora_serve.core.errors import AdapterNotFoundError, InvalidRequestError
from lora_serve.core.messages import Evict
from lora_serve.core.tenant import ADMIN_CALLER, Caller, Role
from lora_serve.server import models
from lora_serve.server.inference.resolve import AdapterResolver
from lora_serve.server.schemas.inference import CompletionFields

BASE = "tiny-base"


async def test_base_is_first_then_the_adapters_by_name(openai: AsyncOpenAI, house: Any) -> None:
    refs = {name: await house.register(name, seed) for seed, name in enumerate(("zeta", "acme/a"))}
    listed = [model async for model in openai.models.list()]
    assert [model.id for model in listed] == [BASE, "acme/a", "zeta"]
    base, adapter = listed[0].model_dump(), listed[1].model_dump()
    assert (base["parent"], base["root"], base["digest"], base["max_model_len"]) == (
        None,
        house.services.spec.name,
        None,
        128,
    )
    assert (adapter["parent"], adapter["owned_by"], adapter["max_model_len"]) == (BASE, "acme", 128)
    assert adapter["digest"] == refs["acme/a"].digest
    assert adapter["object"] == "model"


async def test_one_model_may_be_asked_for(openai: AsyncOpenAI, house: Any) -> None:
    await house.register("acme/a", seed=1)
    new = await house.register("acme/a", seed=2)
    assert (await openai.models.retrieve(BASE)).id == BASE
    assert (await openai.models.retrieve("acme/a")).model_dump()["digest"] == new.digest
    assert (await openai.models.retrieve("acme/a@2")).id == "acme/a@2"
    with pytest.raises(NotFoundError, match="does not exist or you do not have access to it"):
        await openai.models.retrieve("acme/nobody")


async def test_model_is_deleted_by_the_admin_only(
    http: aiohttp.ClientSession, admin: aiohttp.ClientSession, house: Any
) -> None:
    ref = await house.register("acme/a")
    async with http.delete("/v1/models/acme/a") as answer:
        assert answer.status == 401
    async with admin.delete("/v1/models/acme/a") as answer:
        assert (answer.status, await answer.json()) == (200, {"id": "acme/a", "object": "model", "deleted": True})
    await house.services.background.close()
    assert Evict(ref.digest, forget=True) in house.engine.commands
    for name in ("acme/a", "acme/a@1", BASE):
        async with admin.delete(f"/v1/models/{name}") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["message"].startswith(f"The model `{name}` does not exist")


async def test_one_version_is_deleted_by_its_name(admin: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/a", seed=1)
    await house.register("acme/a", seed=2)
    async with admin.delete("/v1/models/acme/a@2") as answer:
        assert answer.status == 200
    assert house.services.catalog.resolve("acme/a").ref.version == 1


async def test_path_of_the_model_means_the_base_where_vllms_clients_send_it(house: Any, openai: AsyncOpenAI) -> None:
    caller, named = ADMIN_CALLER, {"limits": house.services.adapter_limits, "catalog": house.services.catalog}
    others = frozenset({"/models/tiny", "demo/model"})
    resolver = AdapterResolver(base_name="tiny", caller=caller, other_names=others, **named)
    assert resolver.find("/models/tiny") is None
    assert resolver.find("tiny") is None
    for name in ("", "/models", "models/tiny"):
        with pytest.raises(AdapterNotFoundError):
            resolver.find(name)
    with pytest.raises(AdapterNotFoundError):
        AdapterResolver(base_name="tiny", caller=caller, **named).find("")
    closed = replace(resolver, caller=Caller("acme", may_use_base=False))
    with pytest.raises(AdapterNotFoundError):
        closed.find("demo/model")
    assert resolver.find("demo/model") is None
    ref = await house.register("demo/model")
    assert (found := resolver.find("demo/model")) is not None, "an adapter of that id wins"
    assert found.ref == ref
    foreign = replace(resolver, caller=Caller("acme"))
    assert foreign.find("demo/model") is None, "for a tenant that does not see it, it does not exist"
    body = CompletionFields(prompt="x", model="demo/model", adapter_id="acme/a")
    ref = await house.register("acme/a")
    assert foreign.resolve(body, {}).members[0].ref == ref
    with pytest.raises(InvalidRequestError, match="name the same adapter"):
        resolver.resolve(body, {})


async def test_root_is_the_path_as_it_was_given_to_the_operator_alone(
    admin: aiohttp.ClientSession, openai: AsyncOpenAI, house: Any
) -> None:
    """As vLLM's tests want it; a tenant reads no path of the machine, and of a shared adapter not even the source."""
    folder = str(house.make_adapter("a"))
    async with admin.post("/v1/load_lora_adapter", json={"lora_name": "acme/sql", "lora_path": folder}) as answer:
        assert answer.status == 200
    assert (await openai.models.retrieve("acme/sql")).model_dump()["root"] == folder  # on loopback, without keys
    entry = house.services.catalog.entry("acme/sql")
    for caller, root in (
        (ADMIN_CALLER, folder),
        (Caller("acme", Role.TENANT_ADMIN), "folder a"),
        (Caller("globex"), "acme/sql@1"),
    ):
        services = replace(house.services, authenticator=replace(house.services.authenticator, required=True))
        card = models._adapter_card(services, caller, entry, "acme/sql", entry.ref())
        assert (card.root, card.digest) == (root, entry.default.digest)
    async with admin.get("/admin/adapters/acme/sql") as answer:
        assert (await answer.json())["source"] == "folder a"


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "/v1/models/acme/a/", "/admin/adapters/acme/a/"])
async def test_slash_at_the_end_changes_nothing(admin: aiohttp.ClientSession, house: Any, path: str) -> None:
    await house.register("acme/a")
    async with admin.get(path) as slashed, admin.get(path.rstrip("/")) as plain:
        assert (slashed.status, plain.status) == (200, 200)
        assert await slashed.read() == await plain.read()
    async with admin.post("/v1/completions/", json={"model": "acme/a", "prompt": "x", "max_tokens": 1}) as answer:
        assert answer.status == 200
