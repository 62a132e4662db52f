"""/v1/messages in Anthropic's form: whole, streamed, refused. scripts/clients asks it with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from lora_serve.core.errors import InternalError
from lora_serve.core.request import FinishReason
from tests.mock_engine import MockReply
from tests.server.answer_schemas import EVENTS, faults_of

Ids = Callable[[str], tuple[int, ...]]
HI = [{"role": "user", "content": "Say it"}]
TEXT = "Hello wörld 😀"


def says(house: Any, ids: Ids, text: str, **reply: Any) -> None:
    house.engine.script = lambda request: MockReply(token_ids=ids(text), **{"finish": FinishReason.STOP, **reply})


async def post(http: aiohttp.ClientSession, path: str = "/v1/messages", **body: Any) -> tuple[int, Any]:
    async with http.post(path, json={"messages": HI, "max_tokens": 50, **body}) as answer:
        return answer.status, await answer.json()


async def ask(http: aiohttp.ClientSession, **body: Any) -> Any:
    status, answer = await post(http, **body)
    assert status == 200, answer
    return answer


async def events_of(http: aiohttp.ClientSession, **body: Any) -> list[Any]:
    async with http.post("/v1/messages", json={"messages": HI, "max_tokens": 50, "stream": True, **body}) as answer:
        assert answer.status == 200
        blocks = (await answer.text()).removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [fault for event in events for fault in faults_of("POST", "/v1/messages", EVENTS, event)] == []
    return events


async def test_answer_is_one_message_of_blocks(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    says(house, ids, TEXT, num_cached_tokens=2)
    answer = await ask(http)
    assert answer["content"] == [{"type": "text", "text": TEXT}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny-base")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    num_prompt = len(house.engine.requests[0].prompt_token_ids)
    assert answer["usage"] == {
        "input_tokens": num_prompt - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": len(ids(TEXT)),
    }


async def test_events_come_in_anthropics_order_and_add_up(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    says(house, ids, TEXT)
    events = await events_of(http)
    names = [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == TEXT
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(ids(TEXT))


async def test_reason_of_the_end_is_told(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    says(house, ids, "one STOP two", finish=None)
    assert (await ask(http, max_tokens=2))["stop_reason"] == "max_tokens"
    answer = await ask(http, stop_sequences=["STOP"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
    assert answer["content"][0]["text"] == "one "
    assert (await events_of(http, stop_sequences=["STOP"]))[-2]["delta"]["stop_sequence"] == "STOP"


async def test_system_and_blocks_are_the_same_chat(http: aiohttp.ClientSession, house: Any) -> None:
    await ask(
        http,
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Well"}]},
            {"role": "user", "content": "Sure?"},
        ],
    )
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One\ntwo"},
        {"role": "assistant", "content": "Well"},
        {"role": "user", "content": "Sure?"},
    ]
    async with http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}) as answer:
        assert answer.status == 200
    first, second = house.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_last_message_of_the_assistant_is_continued(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    says(house, ids, "ris")
    messages = [*HI, {"role": "assistant", "content": "Pa"}]
    assert (await ask(http, messages=messages))["content"][0]["text"] == "ris"
    assert house.engine.requests[0].prompt_token_ids[-2:] == ids("Pa")[-2:]


async def test_fields_reach_the_engine(http: aiohttp.ClientSession, house: Any) -> None:
    await ask(http, temperature=0.5, top_p=0.25, top_k=4, max_tokens=7, metadata={"user_id": "me"}, priority=3)
    (request,) = house.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 4, 7)
    assert request.priority == 3


async def test_output_format_is_a_grammar(http: aiohttp.ClientSession, house: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await ask(http, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert house.engine.requests[0].grammar is not None


async def test_tokens_are_counted_as_they_will_be_used(http: aiohttp.ClientSession, house: Any) -> None:
    await ask(http, system="Be short.")
    status, answer = await post(http, "/v1/messages/count_tokens", system="Be short.")
    assert (status, answer) == (200, {"input_tokens": len(house.engine.requests[0].prompt_token_ids)})


REFUSED = {
    "max_tokens": {"max_tokens": 0},
    "max_tokens ": {"max_tokens": 5000},
    "messages[0].role": {"messages": [{"role": "king", "content": "x"}]},
    "messages[0].content[0]": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "system[0]": {"system": [{"type": "image"}]},
    "tools[0]": {"tools": ["web_search"]},
    "tool_choice.type": {"tool_choice": {"type": "perhaps"}},
    "tool_choice.type ": {"tool_choice": {"type": ["any"]}},
    "thinking.type": {"thinking": {"type": "perhaps"}},
    "stop_sequences": {"stop_sequences": [""]},
    "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
    "container": {"container": "c"},
    "temperature": {"temperature": 3},
}


@pytest.mark.many(5)
@pytest.mark.parametrize("field", REFUSED)
async def test_wrong_field_is_refused_in_anthropics_form(http: aiohttp.ClientSession, field: str) -> None:
    status, answer = await post(http, **REFUSED[field])
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert field.strip() in answer["error"]["message"]
    assert answer["request_id"]


async def test_errors_have_anthropics_names(http: aiohttp.ClientSession, house: Any) -> None:
    status, answer = await post(http, model="nobody/nothing")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    house.engine.script = lambda request: MockReply(error=InternalError("oops"))
    status, answer = await post(http)
    assert (status, answer["error"]["type"]) == (500, "api_error")
    assert "oops" not in answer["error"]["message"]


async def test_error_in_the_middle_is_an_event(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    says(house, ids, TEXT, error=InternalError("oops"), error_after=2)
    last = (await events_of(http))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


class TestWithKeys:
    """The key may come in Anthropic's header."""

    @pytest.fixture
    def auth_required(self) -> bool:
        return True

    async def test_key_is_accepted_in_x_api_key(self, http: aiohttp.ClientSession, house: Any) -> None:
        status, answer = await post(http)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        for headers, expected in (
            ({"x-api-key": "admin-key-of-the-tests"}, 200),
            ({"api-key": "wrong"}, 401),
            ({"api-key": "admin-key-of-the-tests"}, 200),
            ({"api-key": "admin-key-of-the-tests", "x-api-key": "wrong"}, 200),
            ({"api-key": "admin-key-of-the-tests", "Authorization": "Basic Zm9v"}, 200),
            ({"api-key": "admin-key-of-the-tests", "Authorization": "Bearer "}, 200),
            ({"api-key": "wrong", "x-api-key": "admin-key-of-the-tests", "Authorization": "Bearer wrong"}, 200),
            ({"api-key": "wrong", "x-api-key": "wrong", "Authorization": "Basic Zm9v"}, 401),
        ):
            async with http.post("/v1/messages", json={"messages": HI, "max_tokens": 1}, headers=headers) as reply:
                assert reply.status == expected


async def test_errors_keep_their_form_behind_a_trailing_slash(http: aiohttp.ClientSession) -> None:
    status, answer = await post(http, "/v1/messages/", messages=[])
    assert (status, answer["type"]) == (400, "error")
