"""Functions called through /v1/responses, with the real openai client: whole, streamed, and answered later."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import BASE
from tests.server.tools.conftest import Says

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": CITY}
ASKED: Any = {"model": BASE, "input": [{"role": "user", "content": "How is the weather?"}], "tools": [WEATHER]}
KOELN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ROM = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'


async def test_calls_are_items_of_output(openai: AsyncOpenAI, says: Says) -> None:
    says(f"I look.\n{KOELN}\n{ROM}")
    answer = await openai.responses.create(**ASKED)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.output_text.strip() == "I look."
    calls: Any = answer.output[1:]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("get_weather", {"city": "Köln"}),
        ("get_weather", {"city": "Rom"}),
    ]
    assert calls[0].call_id != calls[1].call_id
    assert answer.status == "completed"


async def test_white_space_before_a_call_is_no_message(openai: AsyncOpenAI, says: Says) -> None:
    says(f"\n\n{KOELN}\n")
    answer = await openai.responses.create(**ASKED)
    assert [item.type for item in answer.output] == ["function_call"]


async def test_streamed_calls_add_up(openai: AsyncOpenAI, says: Says) -> None:
    says(f"{KOELN}\n{ROM}")
    async with openai.responses.stream(**ASKED) as stream:
        events = [event async for event in stream]
        final: Any = await stream.get_final_response()
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments)["city"] for event in done] == ["Köln", "Rom"]
    for event in done:
        deltas = [
            e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.item_id == event.item_id
        ]
        assert "".join(deltas) == event.arguments
        assert len(deltas) > 1
    assert [item.call_id for item in final.output] == [
        event.item.call_id for event in events if event.type == "response.output_item.done"
    ]


async def test_output_of_a_function_goes_back_as_the_same_chat(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(KOELN)
    first: Any = await openai.responses.create(**ASKED)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "Rain"}
    says("It rains.")
    items = [*ASKED["input"], *(item.to_dict() for item in first.output), output]
    second = await openai.responses.create(**{**ASKED, "input": items})
    assert second.output_text == "It rains."
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    messages = [
        *ASKED["input"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Rain"},
    ]
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    tools: Any = [{"type": "function", "function": function}]
    expected = text_model.wrapper.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    assert list(house.engine.requests[-1].prompt_token_ids) == list(expected["input_ids"])


async def test_choice_of_a_function_is_chats(openai: AsyncOpenAI, says: Says) -> None:
    says("Well.")
    with pytest.raises(BadRequestError, match="get_moon"):
        await openai.responses.create(**ASKED, tool_choice={"type": "function", "name": "get_moon"})
    answer = await openai.responses.create(**ASKED, tool_choice="none")
    assert answer.output_text == "Well."
