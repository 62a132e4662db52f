"""Which requests leave, under which names, and what of them is sent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.core.setting_groups.overflow import OverflowConfig
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.server.overflow.neighbour import HEADER
from tests.server.conftest import ADMIN, House
from tests.server.overflow.conftest import Actor, Busy, chunk, overflow_of, streams

ANSWER = streams(chunk(token_ids=[65], text="a"), chunk(token_ids=[], finish_reason="stop"), b"data: [DONE]\n\n")
COMPLETION = {"model": "tiny-base", "prompt": "x", "max_tokens": 5}
CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture
def model_map() -> tuple[tuple[str, str], ...]:
    return ()


@pytest.fixture
def overflow_config(actor: Actor, model_map: tuple[tuple[str, str], ...]) -> OverflowConfig:
    actor.answer = ANSWER
    return OverflowConfig(
        overflow=(f"near={actor.url}",), overflow_after_ms=0, overflow_model_map=model_map, overflow_api_key="a-key"
    )


async def leaves(busy: Busy, http: aiohttp.ClientSession, body: dict[str, Any], path: str = "/v1/completions") -> bool:
    """Whether a neighbour answered; if not, the request waits here."""
    before = busy.num_here

    async def ask() -> bool:
        async with http.post(path, json=body) as answered:
            assert answered.status == 200, await answered.text()
            return "X-Served-By" in answered.headers

    task = asyncio.create_task(ask())
    async with asyncio.timeout(10):
        while not task.done() and busy.num_here == before:
            await asyncio.sleep(0.001)
    if busy.num_here > before:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    return await task


async def test_prompt_leaves_as_token_ids_and_every_rule_in_numbers(
    busy: Busy, actor: Actor, http: aiohttp.ClientSession, ids: Any
) -> None:
    more = {
        "temperature": 0.5,
        "min_tokens": 2,
        "stop": ["s"],
        "stop_token_ids": [7],
        "logit_bias": {"3": -1},
        "top_k": 4,
    }
    assert await leaves(busy, http, COMPLETION | more | {"prompt": "Hello", "user": "somebody", "unknown": 1})
    (body,), (headers,) = actor.bodies, actor.headers
    assert body.pop("prompt") == list(ids("<s>Hello"))
    assert len(body.pop("cache_salt")) == 64
    (end,) = ids("<|end|>")
    assert body == {
        "model": "tiny-base", "stream": True, "return_token_ids": True, "max_tokens": 5, "temperature": 0.5,
        "top_p": 1.0, "top_k": 4, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "ignore_eos": True, "stop_token_ids": [7, end, *ids("</s>")], "min_tokens": 2,
        "logit_bias": {"3": -1.0}, "stop": ["s"],
    }  # fmt: skip
    assert headers["Authorization"] == "Bearer a-key"
    assert headers["X-Lora-Serve-Overflow"]
    assert set(headers) == {
        "Host", "X-Lora-Serve-Overflow", "Accept-Encoding", "Authorization", "Content-Type", "X-Request-ID", "Accept",
        "User-Agent", "Content-Length",
    }  # fmt: skip


async def test_tenants_have_salts_of_their_own(busy: Busy, actor: Actor, http: aiohttp.ClientSession) -> None:
    for salt in ("one", "two", "one"):
        assert await leaves(busy, http, COMPLETION | {"cache_salt": salt})
    salts = [body["cache_salt"] for body in actor.bodies]
    assert (salts[0] == salts[2], salts[0] == salts[1], "one" in salts[0]) == (True, False, False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"seed": 1, "temperature": 0}),
        ("/v1/completions", COMPLETION | {"prompt": [1, 2, 3]}),
        ("/v1/completions", COMPLETION | {"echo": True, "return_token_ids": True}),
        ("/v1/chat/completions", CHAT),
    ],
)
async def test_request_leaves(busy: Busy, http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    assert await leaves(busy, http, body, path)


@pytest.mark.many(6)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"seed": 1}),
        ("/v1/completions", COMPLETION | {"logprobs": 1}),
        ("/v1/completions", COMPLETION | {"prompt_logprobs": 1}),
        ("/v1/completions", COMPLETION | {"bad_words": ["a"]}),
        ("/v1/completions", COMPLETION | {"priority": -1}),
        ("/v1/completions", COMPLETION | {"on_cold": "fail"}),
        ("/v1/completions", COMPLETION | {"max_cold_wait_ms": 10_000}),
        ("/v1/completions", COMPLETION | {"response_format": SCHEMA}),
        ("/v1/completions", COMPLETION | {"model": "acme/a@1"}),
        ("/v1/completions", COMPLETION | {"adapters": [{"id": "acme/a", "scale": 0.5}]}),
        ("/v1/completions", COMPLETION | {"adapters": [{"id": "acme/a"}, {"id": "acme/b"}]}),
        ("/v1/completions", COMPLETION | {"model": "acme/form"}),
    ],
)
async def test_request_stays(
    house: House, busy: Busy, actor: Actor, http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    await house.register("acme/a")
    await house.register("acme/b", seed=1)
    await house.register("acme/form", seed=2, metadata={"response_format": SCHEMA})
    assert not await leaves(busy, http, body, path)
    assert actor.bodies == []


async def test_adapters_own_defaults_leave_with_the_request(
    house: House, busy: Busy, actor: Actor, http: aiohttp.ClientSession
) -> None:
    await house.register("acme/a", metadata={"sampling": {"temperature": 0.25, "max_tokens": 3}})
    assert await leaves(busy, http, {"model": "acme/a", "prompt": "x"})
    (body,) = actor.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("acme/a", 0.25, 3)


@pytest.mark.parametrize(
    "model_map",
    [(("acme/a", "theirs"), ("acme/*", "lora-*"), ("acme/b@2", "b-second"), ("acme/c", ""), ("tiny-base", "big"))],
)
async def test_only_what_the_map_names_leaves_under_the_name_there(
    house: House, busy: Busy, actor: Actor, http: aiohttp.ClientSession
) -> None:
    for number, name in enumerate(("acme/a", "acme/b", "acme/c", "acme/other", "else/x")):
        await house.register(name, seed=number)
    await house.register("acme/b", seed=77, activate=False)
    asked = ["acme/a", "acme/b", "acme/c", "acme/other", "else/x", "acme/b@2", "acme/b@1", "tiny-base"]
    left = [await leaves(busy, http, COMPLETION | {"model": name}) for name in asked]
    assert left == [True, True, False, True, False, True, False, True]
    assert [body["model"] for body in actor.bodies] == ["theirs", "lora-b", "lora-other", "b-second", "big"]


async def test_adapter_whose_name_means_two_versions_stays(
    house: House, busy: Busy, http: aiohttp.ClientSession, admin: aiohttp.ClientSession
) -> None:
    await house.register("acme/a")
    assert await leaves(busy, http, COMPLETION | {"model": "acme/a"})
    await house.register("acme/a", seed=1, activate=False)
    async with admin.put("/admin/adapters/acme/a/route", json={"canary": {"version": 2, "percent": 50}}) as changed:
        assert changed.status == 200, await changed.text()
    assert not await leaves(busy, http, COMPLETION | {"model": "acme/a"})


class TestTenants:
    @pytest.fixture
    def auth_required(self) -> bool:
        return True

    async def test_nothing_leaves_of_a_tenant_that_forbids_it(
        self, house: House, actor: Actor, admin: aiohttp.ClientSession
    ) -> None:
        async def call(method: str, path: str, body: Any) -> Any:
            async with admin.request(method, path, json=body) as answered:
                assert answered.status in (200, 201), await answered.text()
                return await answered.json()

        overflow = overflow_of(house)
        overflow._gate.predicted_wait = lambda rows: 9.0  # type: ignore[method-assign]
        secrets = {}
        for name, offload in (("acme", False), ("other", True)):
            made = await call("POST", "/admin/tenants", {"name": name, "offload": offload})
            assert made["offload"] is offload
            secrets[name] = (await call("POST", f"/admin/tenants/{name}/keys", {}))["secret"]
        await house.register("acme/a", tenant="acme")
        await call("PUT", "/admin/adapters/acme/a/sharing", {"shared_with": ["*"]})

        async def left(key: str, model: str) -> bool:
            headers = {"Authorization": f"Bearer {secrets.get(key, key)}"}
            async with (
                aiohttp.ClientSession(house.url, headers=headers) as http,
                http.post("/v1/completions", json=COMPLETION | {"model": model}) as answered,
            ):
                assert answered.status == 200, await answered.text()
                return "X-Served-By" in answered.headers

        asked = [("acme", "tiny-base"), ("other", "tiny-base"), ("other", "acme/a")]
        assert [await left(*one) for one in asked] == [False, True, False]
        (key,) = [header.removeprefix("Bearer ") for header in ADMIN.values()]
        assert not await left(key, "acme/a")  # whoever acts for the tenant
        assert (await call("PATCH", "/admin/tenants/acme", {"offload": True}))["offload"]
        assert await left("acme", "acme/a")
        assert (await call("PATCH", "/admin/tenants/acme", {"may_use_base": True}))["offload"]


async def test_full_queue_is_no_reason_to_refuse_while_a_neighbour_is_there(
    house: House, busy: Busy, http: aiohttp.ClientSession
) -> None:
    gate = house.engine.gate
    gate.limits = replace(gate.limits, max_queue=1)
    assert await leaves(busy, http, COMPLETION)
    overflow_of(house).neighbours[0].is_self = True
    async with http.post("/v1/completions", json=COMPLETION) as answered:
        assert answered.status == 503


async def test_full_queue_refuses_unread_what_may_not_leave(
    house: House, busy: Busy, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.engine.gate.limits = replace(house.engine.gate.limits, max_queue=1)
    sent_on, not_json = {HEADER: "another server"}, {"data": b"{", "headers": {"Content-Type": "application/json"}}
    async with http.post("/v1/completions", **not_json) as answered:
        assert answered.status == 400  # it was read, as a neighbour might have taken it
    async with http.post("/v1/completions", **{**not_json, "headers": not_json["headers"] | sent_on}) as answered:
        assert answered.status == 503
    monkeypatch.setattr(overflow_of(house), "_may_leave", lambda tenant: False)
    async with http.post("/v1/completions", **not_json) as answered:
        assert answered.status == 503


async def test_slower_neighbour_is_not_asked(house: House, busy: Busy, http: aiohttp.ClientSession) -> None:
    (neighbour,) = overflow_of(house).neighbours
    neighbour.began(60.0)
    assert not await leaves(busy, http, COMPLETION)


def test_gate_without_forecast_predicts_nothing_but_a_refusal() -> None:
    assert QueueGate(QueueLimits(max_queue=4)).predicted_wait(()) == 0.0
