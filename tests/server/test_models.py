"""/v1/models"""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, NotFoundError

from lora_serve.core.messages import Evict

BASE = "tiny-base"


async def test_base_is_first_then_the_adapters_by_name(openai: AsyncOpenAI, house: Any) -> None:
    refs = {name: await house.register(name, seed) for seed, name in enumerate(("zeta", "acme/a"))}
    models = [model async for model in openai.models.list()]
    assert [model.id for model in models] == [BASE, "acme/a", "zeta"]
    base, adapter = models[0].model_dump(), models[1].model_dump()
    assert (base["parent"], base["root"], base["max_model_len"]) == (None, BASE, 128)
    assert (adapter["parent"], adapter["owned_by"], adapter["max_model_len"]) == (BASE, "acme", 128)
    assert adapter["root"] == f"acme/a@{refs['acme/a'].digest}"
    assert adapter["object"] == "model"


async def test_one_model_may_be_asked_for(openai: AsyncOpenAI, house: Any) -> None:
    await house.register("acme/a", seed=1)
    new = await house.register("acme/a", seed=2)
    assert (await openai.models.retrieve(BASE)).id == BASE
    assert (await openai.models.retrieve("acme/a")).model_dump()["root"].endswith(new.digest)
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
