"""An adapter's own defaults: what its metadata says counts for whatever a request leaves out, over the wire."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from lora_serve.core.request import SamplingParams
from lora_serve.server.inference.defaults import NO_DEFAULTS, SAMPLING_NAMES, known_defaults, read_defaults
from lora_serve.server.schemas.inference import ChatFields, CompletionFields

SCHEMA = {"type": "json_schema", "json_schema": {"name": "row", "schema": {"type": "object"}}}
SAMPLING = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 5, "presence_penalty": 1.0,
            "frequency_penalty": -1.0, "repetition_penalty": 1.5, "seed": 11, "stop": ["END"], "stop_token_ids": [3, 3],
            "include_stop_str_in_output": True, "skip_special_tokens": False, "ignore_eos": True}  # fmt: skip
MESSAGES = [{"role": "user", "content": "hello"}]


async def register(admin: aiohttp.ClientSession, house: Any, name: str, metadata: Any, seed: int = 1) -> Any:
    folder = house.make_adapter(name.replace("/", "-"), seed)
    body = {"id": name, "source": str(folder), "metadata": metadata}
    async with admin.post("/admin/adapters", json=body) as answer:
        return answer.status, await answer.json()


async def sampling_of(http: aiohttp.ClientSession, house: Any, path: str, **body: Any) -> SamplingParams:
    """The sampling that the engine is given for a request."""
    given = {"prompt": "x"} if path.endswith("/completions") and "chat" not in path else {"messages": MESSAGES}
    async with http.post(path, json={**given, **body}) as answer:
        assert answer.status == 200, await answer.text()
    found: SamplingParams = house.engine.requests[-1].sampling
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_defaults_count_for_what_a_request_leaves_out(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any, path: str
) -> None:
    status, card = await register(admin, house, "acme/a", {"sampling": SAMPLING})
    assert (status, card["defaults"]) == (201, {"sampling": {**SAMPLING, "stop": ["END"]}})
    found = await sampling_of(http, house, path, model="acme/a")
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.max_tokens) == (0.25, 0.5, 7, 0.1, 5)
    assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (found.seed, found.stop_token_ids, found.ignore_eos) == (11, (3,), True)
    own = await sampling_of(http, house, path, model="acme/a", temperature=1.0, max_tokens=2, seed=1, top_p=None)
    assert (own.temperature, own.max_tokens, own.seed, own.top_k) == (1.0, 2, 1, 7)  # those of the request count
    assert own.top_p == 0.5  # null is as if the field were left out, as everywhere in OpenAI's API
    assert (await sampling_of(http, house, path, model="tiny-base")).temperature == 1.0


async def test_default_of_max_tokens_shrinks_to_the_room_that_a_prompt_leaves(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    await register(admin, house, "acme/a", {"sampling": {"max_tokens": 100}})
    prompt = list(range(100, 190))
    async with http.post("/v1/completions", json={"model": "acme/a", "prompt": prompt}) as answer:
        assert answer.status == 200, await answer.text()
    assert house.engine.requests[-1].sampling.max_tokens == 128 - 90
    body = {"model": "acme/a", "prompt": prompt, "max_tokens": 100}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 400  # asked for, it must fit
    chat = {"model": "acme/a", "messages": MESSAGES, "max_completion_tokens": 3}
    async with http.post("/v1/chat/completions", json=chat) as answer:
        assert answer.status == 200
    assert house.engine.requests[-1].sampling.max_tokens == 3


async def test_stop_of_the_adapter_ends_its_answers(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    await register(admin, house, "acme/a", {})
    body = {"model": "acme/a", "prompt": "x", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    async with http.post("/v1/completions", json=body) as answer:
        text = (await answer.json())["choices"][0]["text"]
    stop = text[2:4]
    async with admin.patch("/admin/adapters/acme/a", json={"metadata": {"sampling": {"stop": stop}}}) as answer:
        assert answer.status == 200, await answer.text()
    async with http.post("/v1/completions", json=body) as answer:
        choice = (await answer.json())["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (text[: text.index(stop)], stop)
    async with http.post("/v1/completions", json={**body, "stop": []}) as answer:
        assert (await answer.json())["choices"][0]["text"] == text  # turned off by the request


async def test_metadata_is_changed_without_a_registration(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    _, before = await register(admin, house, "acme/a", {"team": "a", "sampling": {"temperature": 0.5}})
    async with admin.patch("/admin/adapters/acme/a", json={"metadata": {"sampling": {"top_k": 3}}}) as answer:
        card = await answer.json()
    assert (answer.status, card["metadata"], card["defaults"]) == (200, {"sampling": {"top_k": 3}}, card["metadata"])
    assert (card["version"], card["digest"]) == (before["version"], before["digest"])
    found = await sampling_of(http, house, "/v1/completions", model="acme/a")
    assert (found.temperature, found.top_k) == (1.0, 3)
    async with admin.patch("/admin/adapters/acme/a", json={"metadata": {"sampling": {"temperature": 9}}}) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "metadata.sampling.temperature")
    async with admin.patch("/admin/adapters/acme/a", json={"metadata": {}}) as answer:
        card = await answer.json()
    assert (card["metadata"], card["defaults"]) == ({}, None)
    for body, status in (({}, 400), ({"metadata": []}, 400), ({"metadata": {"x": "y" * 70_000}}, 400)):
        async with admin.patch("/admin/adapters/acme/a", json=body) as answer:
            assert answer.status == status
    async with admin.patch("/admin/adapters/acme/nobody", json={"metadata": {}}) as answer:
        assert answer.status == 404


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"temperature": 3}}, "metadata.sampling.temperature"),
    ({"sampling": {"temperature": "hot"}}, "metadata.sampling.temperature"),
    ({"sampling": {"max_tokens": 0}}, "metadata.sampling.max_tokens"),
    ({"sampling": {"stop": ["x"] * 17}}, "metadata.sampling.stop"),
    ({"sampling": {"n": 2}}, "metadata.sampling.n"),
    ({"sampling": {"model": "acme/b"}}, "metadata.sampling.model"),
    ({"sampling": {"stream": True}}, "metadata.sampling.stream"),
    ({"sampling": [1]}, "metadata.sampling"),
    ({"response_format": "json"}, "metadata.response_format"),
    ({"response_format": {"type": "xml"}}, "metadata.response_format"),
    ({"response_format": {"type": "json_schema"}}, "metadata.response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        "metadata.response_format.json_schema.schema",
    ),
    ({"tool_call_parser": "../etc"}, "metadata.tool_call_parser"),
    ({"tool_call_parser": "herms"}, "metadata.tool_call_parser"),
    ({"reasoning_parser": 3}, "metadata.reasoning_parser"),
]


@pytest.mark.many(5)
@pytest.mark.parametrize(("metadata", "param"), WRONG)
async def test_defaults_that_no_request_could_have_are_refused_at_registration(
    admin: aiohttp.ClientSession, house: Any, metadata: dict[str, Any], param: str
) -> None:
    status, body = await register(admin, house, "acme/a", metadata)
    assert (status, body["error"]["param"]) == (400, param), body
    if param.startswith("metadata.sampling.") and "may not hold" in body["error"]["message"]:
        assert "temperature" in body["error"]["message"]  # it says what is allowed
    async with admin.get("/admin/adapters/acme/a") as answer:
        assert answer.status == 404


async def test_composed_adapters_have_no_defaults_and_a_single_one_has_whatever_its_scale(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    for seed, name in enumerate(("acme/a", "acme/b"), start=1):
        await register(admin, house, name, {"sampling": {"temperature": seed / 10}}, seed)
    both = [{"id": "acme/a"}, {"id": "acme/b"}]
    assert (await sampling_of(http, house, "/v1/completions", adapters=both)).temperature == 1.0
    half = [{"id": "acme/b", "scale": 0.5}]
    assert (await sampling_of(http, house, "/v1/completions", adapters=half)).temperature == 0.2
    cold = await sampling_of(http, house, "/v1/completions", model="acme/a", on_cold="base")
    assert cold.temperature == 0.1  # whoever answers, the caller named this one


def test_metadata_of_a_time_before_there_were_defaults_means_nothing() -> None:
    for metadata in ({"sampling": "every third row"}, {"response_format": 3}, {"labels": ["a"]}, {}):
        assert known_defaults(metadata) == NO_DEFAULTS
    assert read_defaults(None) == NO_DEFAULTS


def test_response_format_counts_unless_the_request_asks_for_a_form_of_its_own() -> None:
    defaults = read_defaults({"response_format": SCHEMA, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"})
    assert (defaults.tool_call_parser, defaults.reasoning_parser) == ("hermes", "qwen3")
    assert defaults.card() == {"response_format": SCHEMA, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    plain = ChatFields.model_validate({"messages": MESSAGES})
    applied = defaults.applied_to(plain)
    assert applied.response_format == SCHEMA
    tool = {"type": "function", "function": {"name": "f"}}
    for own in (
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_choice": ["a"]},
        {"tools": [tool]},
    ):
        asked = ChatFields.model_validate({"messages": MESSAGES, **own})
        assert defaults.applied_to(asked) is asked
    without = ChatFields.model_validate({"messages": MESSAGES, "tools": [tool], "tool_choice": "none"})
    assert defaults.applied_to(without).response_format == SCHEMA


def test_every_name_of_sampling_is_a_field_of_requests() -> None:
    assert set(SAMPLING_NAMES) <= set(CompletionFields.model_fields) & set(ChatFields.model_fields)


async def test_schema_of_the_adapter_is_the_grammar_of_its_answers(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    status, card = await register(admin, house, "acme/a", {"response_format": SCHEMA, "tool_call_parser": "hermes"})
    assert (status, card["defaults"]["tool_call_parser"]) == (201, "hermes")
    plain = {"max_tokens": 1}
    for path in ("/v1/completions", "/v1/chat/completions"):
        await sampling_of(http, house, path, model="acme/a", **plain)
        assert house.engine.requests[-1].grammar is not None
        await sampling_of(http, house, path, model="acme/a", response_format={"type": "text"}, **plain)
        assert house.engine.requests[-1].grammar is None
        await sampling_of(http, house, path, model="tiny-base", **plain)
        assert house.engine.requests[-1].grammar is None
