"""Which adapter answers, over the wire; and the one 404 for whatever a caller may not have."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, NotFoundError

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterNotFoundError
from lora_serve.core.request import AdapterUse
from lora_serve.core.tenant import Caller
from lora_serve.server.context import AdapterMember, AdapterSet
from lora_serve.server.inference.resolve import AdapterResolver
from lora_serve.server.schemas.inference import SamplingFields

BASE = "tiny-base"


@pytest.fixture
async def refs(house: Any) -> dict[str, AdapterRef]:
    """acme/a with two versions, acme/b, plain, globex/c."""
    found = {"acme/a@1": await house.register("acme/a", seed=1), "acme/a@2": await house.register("acme/a", seed=2)}
    for seed, name in enumerate(("acme/b", "plain", "globex/c"), start=3):
        found[f"{name}@1"] = await house.register(name, seed=seed)
    return found


async def answered_by(http: aiohttp.ClientSession, body: dict[str, Any], header: str | None = None) -> str:
    headers = {} if header is None else {"X-Adapter-Id": header}
    async with http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **body}, headers=headers) as answer:
        if answer.status != 200:
            error = (await answer.json())["error"]
            return f"{answer.status} {error['code'] or error['param']}"
        return f"{answer.headers['X-Adapter-Id']}@{answer.headers['X-Adapter-Version']}"


CHOICES: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, None, f"{BASE}@0"),
    ({"model": BASE}, None, f"{BASE}@0"),
    ({"model": "acme/a"}, None, "acme/a@2"),
    ({"model": "acme/a@1"}, None, "acme/a@1"),
    ({"model": f"{BASE}:acme/a"}, None, "acme/a@2"),
    ({"model": f"{BASE}:acme/a@1"}, None, "acme/a@1"),
    ({"model": "plain"}, None, "plain@1"),
    ({}, "acme/b", "acme/b@1"),
    ({"model": BASE}, "acme/b", "acme/b@1"),
    ({"model": BASE, "adapter_id": "acme/b"}, None, "acme/b@1"),
    ({"adapter_id": "acme/b"}, "acme/a", "acme/b@1"),
    ({"adapters": [{"id": "acme/b", "scale": 1.0}]}, None, "acme/b@1"),
    ({"adapters": [{"id": "acme/b"}]}, None, "acme/b@1"),
    ({"model": "acme/a", "adapter_id": "acme/a@1"}, None, "acme/a@1"),
    ({"model": "acme/a", "adapter_id": "acme/b"}, None, "400 model"),
    ({"model": "acme/a"}, "acme/b", "400 model"),
    ({"model": "acme/a@1"}, "acme/a@2", "400 model"),
    ({"model": "acme/a"}, BASE, "400 model"),
    ({"adapters": [{"id": "acme/b"}], "adapter_id": "acme/a"}, None, "400 adapter_id"),
    ({"adapters": [{"id": "acme/b"}], "adapter_id": "acme/b"}, None, "acme/b@1"),
    ({"adapters": [{"id": "acme/b"}]}, "acme/a", "acme/b@1"),
    ({"adapters": [{"id": "acme/a"}, {"id": "acme/b"}]}, None, "acme/a,acme/b@2,1"),
    ({"adapters": [{"id": "acme/b"}, {"id": "acme/a@1"}]}, None, "acme/b,acme/a@1,1"),
    ({"adapters": [{"id": f"{BASE}:acme/a"}, {"id": "plain"}], "model": BASE}, None, "acme/a,plain@2,1"),
    ({"adapters": [{"id": "acme/a"}, {"id": "plain"}], "model": "plain"}, None, "acme/a,plain@2,1"),
    ({"adapters": [{"id": "acme/a@1"}, {"id": "plain"}], "model": "acme/a"}, None, "acme/a,plain@1,1"),
    ({"adapters": [{"id": "acme/a@1"}, {"id": "plain"}], "model": "acme/a@2"}, None, "400 model"),
    ({"adapters": [{"id": "acme/a"}, {"id": "plain"}], "model": "acme/b"}, None, "400 model"),
    ({"adapters": [{"id": "acme/a"}, {"id": "plain"}], "adapter_id": "plain"}, None, "400 adapter_id"),
    ({"adapters": [{"id": "acme/a"}, {"id": "acme/zzz"}]}, None, "404 model_not_found"),
    ({"adapters": [{"id": BASE}]}, None, "400 adapters"),
    ({"adapters": [{"id": "acme/a"}, {"id": BASE}]}, None, "400 adapters"),
    ({"adapters": [{"id": ""}]}, None, "400 adapters"),
    ({"adapters": []}, None, "400 adapters"),
    ({"adapter_id": ""}, None, "400 adapter_id"),
    ({}, "", "400 X-Adapter-Id"),
    ({"model": ""}, None, "404 model_not_found"),
    ({"model": "acme/zzz"}, None, "404 model_not_found"),
    ({"model": "acme/a@3"}, None, "404 model_not_found"),
    ({"model": "acme/a@sha256:00"}, None, "404 model_not_found"),
    ({"model": "other-base:acme/a"}, None, "404 model_not_found"),
    ({"model": "ACME/A"}, None, "404 model_not_found"),
    ({"model": "../store/acme/a"}, None, "404 model_not_found"),
    ({}, "acme/zzz", "404 model_not_found"),
    ({"model": BASE, "adapter_id": "acme/zzz"}, None, "404 model_not_found"),
]


async def test_adapter_is_chosen_in_the_promised_order(http: aiohttp.ClientSession, refs: Any) -> None:
    for body, header, expected in CHOICES:
        assert await answered_by(http, body, header) == expected, (body, header)


async def test_version_may_be_named_by_its_digest(http: aiohttp.ClientSession, refs: dict[str, AdapterRef]) -> None:
    assert await answered_by(http, {"model": f"acme/a@{refs['acme/a@1'].digest}"}) == "acme/a@1"


async def test_engine_gets_the_very_version_that_the_headers_name(
    http: aiohttp.ClientSession, house: Any, refs: dict[str, AdapterRef]
) -> None:
    for name, ref in refs.items():
        assert await answered_by(http, {"model": name}) == name
        assert house.engine.requests[-1].adapters == (AdapterUse(ref),)


async def test_unknown_adapter_is_never_the_base_model(openai: AsyncOpenAI, house: Any) -> None:
    with pytest.raises(NotFoundError) as caught:
        await openai.chat.completions.create(model="nobody/knows", messages=[{"role": "user", "content": "x"}])
    assert caught.value.body == {
        "message": "The model `nobody/knows` does not exist or you do not have access to it.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert house.engine.requests == []


async def test_foreign_unknown_and_deleted_adapters_are_one_error(house: Any, refs: Any) -> None:
    resolver = AdapterResolver(house.services.catalog, BASE, Caller("acme"), house.services.adapter_config)
    await house.services.registrations.run(lambda: house.services.registry.delete("acme/b"))
    texts = set()
    for name in ("globex/c", "globex/x", "acme/b"):
        with pytest.raises(AdapterNotFoundError) as caught:
            resolver.resolve(SamplingFields(model=name), {})
        texts.add(str(caught.value).replace(name, "NAME"))
    assert len(texts) == 1
    assert resolver.resolve(SamplingFields(model="acme/a"), {}) == AdapterSet((AdapterMember(refs["acme/a@2"]),), BASE)


async def test_header_name_in_any_case(http: aiohttp.ClientSession, refs: Any) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    async with http.post("/v1/completions", json=body, headers={"x-adapter-id": "acme/b"}) as answer:
        assert answer.headers["X-Adapter-Id"] == "acme/b"
