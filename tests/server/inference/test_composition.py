"""Several adapters in one request: which sets are taken, what the engine gets, what the headers say."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import aiohttp
import pytest

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import AdapterUse
from lora_serve.core.tenant import Caller
from lora_serve.server.inference.resolve import AdapterResolver
from lora_serve.server.schemas.inference import SamplingFields

BASE = "tiny-base"
INVOCATION = [7, 8]
Members = list[dict[str, Any]]


@pytest.fixture
async def refs(house: Any) -> dict[str, AdapterRef]:
    """a with two versions, b to e plain, d DoRA, act activated."""
    found = {"a@1": await house.register("a", seed=1), "a": await house.register("a", seed=2)}
    for seed, name in enumerate("bcef", start=3):
        found[name] = await house.register(name, seed=seed)
    found["d"] = await house.register("d", seed=7, settings={"use_dora": True})
    found["act"] = await house.register("act", seed=8, settings={"alora_invocation_tokens": INVOCATION})
    return found


async def ask(session: aiohttp.ClientSession, adapters: Members, **body: Any) -> tuple[Any, Any]:
    """The answer's body and its headers."""
    fields = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0, "adapters": adapters, **body}
    async with session.post("/v1/completions", json=fields) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers


async def refusal(session: aiohttp.ClientSession, adapters: Any) -> str:
    async with session.post("/v1/completions", json={"prompt": "x", "adapters": adapters}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["type"]) == (400, "invalid_request_error"), error
        assert error["param"].startswith("adapters"), error
        return str(error["message"])


async def test_engine_gets_every_member_with_its_scale_and_the_headers_name_them(
    http: aiohttp.ClientSession, house: Any, refs: dict[str, AdapterRef]
) -> None:
    members = [{"id": "b", "scale": 0.5}, {"id": "a@1", "scale": -2}, {"id": "c"}]
    answer, headers = await ask(http, members)
    uses = {use.ref.label: use for use in house.engine.requests[-1].adapters}
    assert uses == {
        "b@1": AdapterUse(refs["b"], 0.5),
        "a@1": AdapterUse(refs["a@1"], -2.0),
        "c@1": AdapterUse(refs["c"], 1.0),
    }
    assert answer["model"] == "b+a+c"
    assert (headers["X-Adapter-Id"], headers["X-Adapter-Version"]) == ("b,a,c", "1,1,1")
    assert headers["X-Adapter-Digest"].split(",") == [refs[name].digest for name in ("b", "a@1", "c")]
    assert headers["X-Adapter-Scale"] == "0.5,-2.0,1.0"
    assert "X-Adapter-Active" not in headers


async def test_chat_composes_too_and_streams(http: aiohttp.ClientSession, house: Any, refs: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "adapters": [{"id": "a"}, {"id": "b", "scale": 0.25}]}
    for stream in (False, True):
        async with http.post("/v1/chat/completions", json={**body, "stream": stream}) as answer:
            assert answer.status == 200
            assert answer.headers["X-Adapter-Scale"] == "1.0,0.25"
            assert '"a+b"' in await answer.text()
        assert len(house.engine.requests[-1].adapters) == 2


async def test_one_member_with_scale_one_is_the_adapter_itself(
    http: aiohttp.ClientSession, house: Any, refs: dict[str, AdapterRef]
) -> None:
    """DoRA and activated adapters too: nothing is composed."""
    for name in ("a", "d", "act"):
        answer, headers = await ask(http, [{"id": name, "scale": 1}])
        listed = house.engine.requests[-1].adapters
        async with http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 4, "adapter_id": name}) as plain:
            assert (await plain.json())["choices"] == answer["choices"]
            assert plain.headers["X-Adapter-Digest"] == headers["X-Adapter-Digest"] == refs[name].digest
        assert house.engine.requests[-1].adapters == listed
        assert answer["model"] == name
        assert "X-Adapter-Scale" not in headers


async def test_null_scale_is_the_same_as_none(http: aiohttp.ClientSession, refs: Any) -> None:
    assert "X-Adapter-Scale" not in (await ask(http, [{"id": "a", "scale": None}]))[1]


async def test_scale_of_one_adapter_reaches_the_engine(
    http: aiohttp.ClientSession, house: Any, refs: dict[str, AdapterRef]
) -> None:
    texts = set()
    for scale in (0, 0.5, 1, 100, -100):
        answer, headers = await ask(http, [{"id": "a", "scale": scale}])
        assert house.engine.requests[-1].adapters == (AdapterUse(refs["a"], float(scale)),)
        assert headers.get("X-Adapter-Scale") == (None if scale == 1 else str(float(scale)))
        texts.add(answer["choices"][0]["text"])
    assert len(texts) == 5


async def test_order_of_members_changes_nothing_but_the_headers(
    http: aiohttp.ClientSession, house: Any, refs: Any
) -> None:
    members = [{"id": "a", "scale": 0.3}, {"id": "b", "scale": -0.7}, {"id": "c"}, {"id": "act", "scale": 2}]
    texts, uses, names = set(), set(), set()
    for order in itertools.permutations(members):
        answer, headers = await ask(http, list(order), prompt=[5, *INVOCATION, 6])
        texts.add(answer["choices"][0]["text"])
        uses.add(house.engine.requests[-1].adapters)
        names.add(headers["X-Adapter-Id"])
    assert (len(texts), len(uses), len(names)) == (1, 1, 24)


@pytest.mark.many(6)
@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ([], "at least 1 item"),
        ([{"id": "a"}] * 9, "at most 8 items"),
        ([{"id": "a"}, {"id": "a"}], "'a@2' twice"),
        ([{"id": "a"}, {"id": "b"}, {"id": "a@2", "scale": 0.5}], "'a@2' twice"),
        ([{"id": name} for name in "abcef"], "--max-loras"),
        ([{"id": "a", "scale": 100.5}], "100"),
        ([{"id": "a", "scale": -1000}], "-100"),
        ([{"id": "a", "scale": 10**400}], ""),
        ([{"id": "a", "scale": "1"}], "number"),
        ([{"id": "a", "scale": True}], "number"),
        ([{"scale": 1.0}], "required"),
        (["a"], "adapters[0]"),
        ({"id": "a"}, "list"),
        ([{"id": "tiny-base"}], "leave it out"),
        ([{"id": "a"}, {"id": "tiny-base", "scale": 2}], "leave it out"),
        ([{"id": "a"}, {"id": "d"}], "use_dora"),
        ([{"id": "d", "scale": 0.5}], "`d@1`"),
        ([{"id": "d", "scale": 0.5}], "use_dora"),
    ],
)
async def test_set_that_cannot_be_is_refused_in_words(
    http: aiohttp.ClientSession, house: Any, refs: Any, adapters: Any, words: str
) -> None:
    assert words in await refusal(http, adapters)
    assert house.engine.requests == []


async def test_scale_that_is_no_number_is_refused(http: aiohttp.ClientSession, refs: Any) -> None:
    for scale in ("NaN", "Infinity", "1e999"):
        raw = '{"prompt": "x", "adapters": [{"id": "a", "scale": %s}]}' % scale  # noqa: UP031
        async with http.post("/v1/completions", data=raw, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400, scale


async def test_one_content_under_two_names_is_refused(http: aiohttp.ClientSession, house: Any, refs: Any) -> None:
    await house.register("b2", seed=3)
    message = await refusal(http, [{"id": "b"}, {"id": "b2"}])
    assert "`b`" in message
    assert "`b2`" in message


async def test_two_versions_of_one_adapter_are_two_members(http: aiohttp.ClientSession, house: Any, refs: Any) -> None:
    _, headers = await ask(http, [{"id": "a@2"}, {"id": "a@1", "scale": -1}])
    assert headers["X-Adapter-Version"] == "2,1"
    assert len(house.engine.requests[-1].adapters) == 2


@pytest.mark.parametrize(
    ("limits", "flag"),
    [({"adapter_host_memory": 500}, "--adapter-host-memory"), ({"adapter_memory": 500}, "--adapter-memory")],
)
async def test_set_that_memory_could_never_hold_is_refused(
    house: Any, refs: dict[str, AdapterRef], limits: dict[str, int], flag: str
) -> None:
    assert refs["a"].num_bytes <= 500 < refs["a"].num_bytes + refs["b"].num_bytes
    config = dataclasses.replace(house.services.adapter_config, **limits)
    resolver = AdapterResolver(house.services.catalog, BASE, Caller("admin", sees_all=True), config)
    assert resolver.resolve(SamplingFields.model_validate({"adapters": [{"id": "a", "scale": 2.0}]}), {}).is_composed
    with pytest.raises(InvalidRequestError, match=flag):
        resolver.resolve(SamplingFields.model_validate({"adapters": [{"id": "a"}, {"id": "b"}]}), {})


async def test_activated_adapter_acts_from_its_invocation_tokens(
    http: aiohttp.ClientSession, house: Any, refs: dict[str, AdapterRef]
) -> None:
    _, headers = await ask(http, [{"id": "act"}], prompt=[*INVOCATION, 1, *INVOCATION, 2])
    assert house.engine.requests[-1].adapters == (AdapterUse(refs["act"], 1.0, start=3),)
    assert headers["X-Adapter-Active"] == "1"


async def test_activated_adapter_without_its_tokens_is_the_base_model_and_says_so(
    http: aiohttp.ClientSession, house: Any, refs: dict[str, AdapterRef]
) -> None:
    answer, headers = await ask(http, [{"id": "act"}])
    assert house.engine.requests[-1].adapters == ()
    assert (headers["X-Adapter-Id"], headers["X-Adapter-Active"]) == ("act", "0")
    async with http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 4, "temperature": 0}) as base:
        assert (await base.json())["choices"] == answer["choices"]
        assert "X-Adapter-Active" not in base.headers


async def test_each_prompt_of_a_request_is_activated_by_its_own_tokens(
    http: aiohttp.ClientSession, house: Any, refs: dict[str, AdapterRef]
) -> None:
    prompts = [[1, *INVOCATION], [1, 2, 3], INVOCATION]
    _, headers = await ask(http, [{"id": "act"}, {"id": "b", "scale": 0.5}], prompt=prompts, n=2)
    assert headers["X-Adapter-Active"] == "2/3,3/3"
    starts = [{use.ref.name: use.start for use in request.adapters} for request in house.engine.requests]
    assert starts == [{"act": 1, "b": 0}] * 2 + [{"b": 0}] * 2 + [{"act": 0, "b": 0}] * 2


async def test_foreign_member_is_the_same_404(house: Any, refs: Any) -> None:
    resolver = AdapterResolver(house.services.catalog, BASE, Caller("acme"), house.services.adapter_config)
    await house.register("acme/own", seed=20)
    fields = SamplingFields.model_validate({"adapters": [{"id": "acme/own"}, {"id": "a"}]})
    with pytest.raises(Exception, match="The model `a` does not exist or you do not have access to it"):
        resolver.resolve(fields, {})


async def test_access_log_names_every_adapter(
    http: aiohttp.ClientSession, refs: dict[str, AdapterRef], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lora_serve.access"):
        await ask(http, [{"id": "b"}, {"id": "a@1", "scale": 0.5}])
    record: Any = next(record for record in caplog.records if record.name == "lora_serve.access")
    assert record.adapter == "b@1+a@1"
    assert record.digest == f"{refs['b'].digest}+{refs['a@1'].digest}"


async def test_metrics_name_every_adapter_of_a_composed_row(http: aiohttp.ClientSession, refs: Any) -> None:
    await ask(http, [{"id": "b"}, {"id": "a", "scale": 0.5}])
    async with http.get("/metrics") as answer:
        text = await answer.text()
    assert 'running_lora_adapters="a,b"' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny-base"} 1.0' in text
