"""gpt-oss's harmony by HTTP: reasoning, preambles, calls and content, whole and streamed, forced, and given back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from lora_serve.core.model_spec import ModelSpec
from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import BASE
from tests.server.tools.conftest import Says, accepts
from tests.text.tool_templates import tool_model

HI: list[Any] = [{"role": "user", "content": "How is the weather?"}]
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY}}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PLAN = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
KOELN = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
ROM = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rom"}<|call|>'


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return tool_model("gpt_oss")


class TestCallsEndTheTurn:
    """As gpt-oss's own generation config has it."""

    @pytest.fixture
    def spec(self, spec: ModelSpec, text_model: TextModel) -> ModelSpec:
        ends = [number for name in ("<|return|>", "<|call|>") if (number := text_model.token_id(name)) is not None]
        return replace(spec, eos_token_ids=tuple(ends))

    @pytest.mark.parametrize("call", [KOELN, ROM])
    async def test_call_is_read_to_its_end(self, openai: AsyncOpenAI, says: Says, call: str) -> None:
        says(f"{THOUGHT}{PLAN}{call}", end=False)
        answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL])
        message: Any = answer.choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", "I look.")
        assert json.loads(message.tool_calls[0].function.arguments)["city"] in call
        assert answer.choices[0].finish_reason == "tool_calls"

    async def test_forced_call_ends_with_it(
        self, openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
    ) -> None:
        says(KOELN, end=False)
        await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL], tool_choice="required")
        assert accepts(text_model, house.engine.requests[0].grammar, f"{THOUGHT}{KOELN}")


async def test_streamed_answer_is_the_same(openai: AsyncOpenAI, says: Says) -> None:
    says(f"{THOUGHT}{PLAN}{KOELN}<|start|>assistant{ROM}")
    content, reasoning, names = "", "", []
    arguments: dict[int, str] = {}
    async for chunk in await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL], stream=True):
        delta: Any = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or ():
            names += [call.function.name] if call.function.name else []
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert (content, reasoning, names) == ("I look.", "Hm.", ["get_weather"] * 2)
    assert [json.loads(text)["city"] for text in arguments.values()] == ["Köln", "Rom"]


async def test_answer_is_the_final_channel_with_and_without_tools(openai: AsyncOpenAI, says: Says) -> None:
    says(f"{THOUGHT}{FINAL}It rains.")
    for body in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}):
        answer: Any = await openai.chat.completions.create(model=BASE, messages=HI, **body)
        message = answer.choices[0].message
        assert (message.content, message.reasoning, message.tool_calls) == ("It rains.", "Hm.", None)


async def test_calls_go_back_as_the_template_takes_them(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(f"{THOUGHT}{PLAN}{KOELN}<|start|>assistant{ROM}")
    first = await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL])
    message = first.choices[0].message.to_dict()
    calls: Any = message["tool_calls"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Rain"} for call in calls]
    await openai.chat.completions.create(model=BASE, messages=[*HI, message, *results], tools=[TOOL])  # type: ignore[list-item]
    prompt = text_model.decode(house.engine.requests[-1].prompt_token_ids, False)
    result = '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"Rain"<|end|>'
    written = [
        f'<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "{city}"}}<|call|>'
        for city in ("Köln", "Rom")
    ]
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm.\nI look.<|end|>"
    assert prompt.endswith(f"{thought}{written[0]}{result}{written[1]}{result}<|start|>assistant")


async def test_answer_of_a_given_form_is_in_the_final_channel(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(f"{THOUGHT}{FINAL}{{}}")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    await openai.chat.completions.create(model=BASE, messages=HI, response_format=form)  # type: ignore[call-overload]
    await openai.chat.completions.create(model=BASE, messages=HI, response_format=form, tools=[TOOL])  # type: ignore[call-overload]
    alone, with_tools = (request.grammar for request in house.engine.requests)
    city = '{"city": "Köln"}'
    for text, may_be in (
        (f"{THOUGHT}{FINAL}{city}", (True, True)),
        (f"{THOUGHT}{THOUGHT}{FINAL}{city}", (True, True)),
        (f"{FINAL}{city}", (True, True)),
        (city, (True, True)),  # the prompt has begun the channel
        (f"{THOUGHT}{city}", (False, False)),
        (f"{THOUGHT}{FINAL}Rain", (False, False)),
        (f"{THOUGHT}{KOELN}", (False, True)),
        (ROM, (False, True)),
    ):
        assert tuple(accepts(text_model, found, text) for found in (alone, with_tools)) == may_be, text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_forced_call_obeys_the_schema(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel, choice: Any
) -> None:
    says(f"{THOUGHT}{KOELN}")
    await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL], tool_choice=choice)
    grammar = house.engine.requests[0].grammar
    for text in (KOELN, ROM, f"{THOUGHT}{KOELN}", KOELN.removesuffix("<|call|>")):
        assert accepts(text_model, grammar, text), text
    several = f"{KOELN}<|start|>assistant{ROM}"
    assert accepts(text_model, grammar, several) is (choice == "required")
    for text in (f"{THOUGHT}{FINAL}Rain", KOELN.replace("city", "town"), KOELN.replace("get_", "set_"), THOUGHT):
        assert not accepts(text_model, grammar, text), text


async def test_responses_and_messages_read_the_same(
    openai: AsyncOpenAI, http: aiohttp.ClientSession, says: Says
) -> None:
    says(f"{THOUGHT}{PLAN}{KOELN}")
    function: Any = {"type": "function", **TOOL["function"]}
    answer: Any = await openai.responses.create(model=BASE, input=HI, tools=[function])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert (answer.output_text, json.loads(answer.output[2].arguments)) == ("I look.", {"city": "Köln"})
    tool = {"name": "get_weather", "input_schema": CITY}
    body = {"messages": HI, "tools": [tool], "max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with http.post("/v1/messages", json={**body, "max_tokens": 2000}) as found:
        blocks = (await found.json())["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert (blocks[1]["text"], blocks[2]["input"]) == ("I look.", {"city": "Köln"})


@pytest.mark.parametrize(("thinking", "kinds"), [("enabled", ["thinking", "text"]), ("disabled", ["text"])])
async def test_messages_show_no_thinking_that_is_disabled(
    http: aiohttp.ClientSession, says: Says, thinking: str, kinds: list[str]
) -> None:
    """This model thinks all the same."""
    says(f"{THOUGHT}{FINAL}It rains.")
    body = {"messages": HI, "max_tokens": 500, "thinking": {"type": thinking}}
    async with http.post("/v1/messages", json=body) as answer:
        content = (await answer.json())["content"]
    assert [block["type"] for block in content] == kinds
    assert content[-1]["text"] == "It rains."
