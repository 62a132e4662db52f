"""Tools through /v1/messages: whole, streamed, and their results in the next messages."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from lora_serve.text.tokenizer import TextModel
from tests.server.tools.conftest import Says

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
HI = {"role": "user", "content": "How is the weather?"}
ASKED: dict[str, Any] = {"messages": [HI], "tools": [WEATHER], "max_tokens": 500}
KOELN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


async def ask(http: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    async with http.post("/v1/messages", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_call_is_a_block(http: aiohttp.ClientSession, says: Says) -> None:
    says(f"I look.\n{KOELN}")
    answer = await ask(http, ASKED)
    text, call = answer["content"]
    assert text["text"].strip() == "I look."
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Köln"})
    assert answer["stop_reason"] == "tool_use"


async def test_streamed_call_is_pieces_of_json(http: aiohttp.ClientSession, says: Says) -> None:
    says(KOELN)
    async with http.post("/v1/messages", json={**ASKED, "stream": True}) as answer:
        lines = (await answer.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    (start,) = [event for event in events if event["type"] == "content_block_start"]
    assert (start["content_block"]["name"], start["content_block"]["input"]) == ("get_weather", {})
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"city": "Köln"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_result_goes_back_as_the_same_chat(
    http: aiohttp.ClientSession, says: Says, house: Any, text_model: TextModel
) -> None:
    says(KOELN)
    first = await ask(http, ASKED)
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][0]["id"],
        "content": [{"type": "text", "text": "Rain"}],
    }
    says("It rains.")
    more = [HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    await ask(http, {**ASKED, "messages": more})
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    messages = [HI, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "Rain"}]
    function = {"name": "get_weather", "description": "The weather.", "parameters": CITY}
    tools: Any = [{"type": "function", "function": function}]
    expected = text_model.wrapper.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    assert list(house.engine.requests[-1].prompt_token_ids) == list(expected["input_ids"])


async def test_tools_count_as_tokens(http: aiohttp.ClientSession, says: Says, house: Any) -> None:
    says("Well.")
    await ask(http, ASKED)
    async with http.post("/v1/messages/count_tokens", json={**ASKED, "max_tokens": None}) as answer:
        assert await answer.json() == {"input_tokens": len(house.engine.requests[0].prompt_token_ids)}
