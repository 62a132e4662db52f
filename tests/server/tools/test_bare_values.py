"""Calls whose values are bare text, typed by the tools' schemas: read, streamed, forced and given back, by HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import BASE
from tests.server.tools.conftest import Says, accepts
from tests.text.tool_templates import tool_model

HI: list[Any] = [{"role": "user", "content": "Write it."}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}},
    "required": ["path", "text"],
}
TOOL: Any = {"type": "function", "function": {"name": "write", "description": "Writes.", "parameters": PARAMETERS}}
ARGUMENTS = {"path": "7", "text": 'if a < b:\n    print("</b>")\n', "mode": 420}


def written(arguments: dict[str, Any]) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=write>\n{pairs}</function>\n</tool_call>"


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return tool_model("qwen3_5")


async def test_call_is_read_behind_the_reasoning_that_the_prompt_has_begun(openai: AsyncOpenAI, says: Says) -> None:
    says(f"Hm.\n</think>\n\n{written(ARGUMENTS)}")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == ARGUMENTS  # type: ignore[union-attr]
    assert getattr(answer.choices[0].message, "reasoning", None) == "Hm.\n"
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_long_text_is_streamed_in_pieces(openai: AsyncOpenAI, says: Says) -> None:
    arguments = {"path": "x", "text": 'a "b" <c>\n' * 40}
    says(f"</think>{written(arguments)}")
    pieces = [
        call.function.arguments
        async for chunk in await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL], stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
        if call.function is not None and call.function.arguments
    ]
    assert json.loads("".join(pieces)) == arguments
    assert len(pieces) > 40


async def test_forced_call_obeys_the_schema(openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel) -> None:
    says(f"</think>{written(ARGUMENTS)}")
    await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL], tool_choice="required")
    grammar = house.engine.requests[0].grammar
    for arguments, may_be in (
        (ARGUMENTS, True),
        ({"path": "", "text": "<parameter=x>"}, True),
        ({"path": "x", "text": "y", "mode": "many"}, False),
        ({"path": "x"}, False),
    ):
        assert accepts(text_model, grammar, f"Hm.</think>\n\n{written(arguments)}") is may_be, arguments
    assert not accepts(text_model, grammar, "Hm.</think>\n\nWell.")


async def test_what_cannot_be_forced_is_refused_in_words(openai: AsyncOpenAI, says: Says) -> None:
    says("Well.")
    path = {**PARAMETERS, "properties": {"path": {"type": "string", "pattern": "^/"}}}
    tool: Any = {"type": "function", "function": {"name": "write", "parameters": path}}
    with pytest.raises(BadRequestError, match="cannot force a value with pattern") as caught:
        await openai.chat.completions.create(model=BASE, messages=HI, tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"
    await openai.chat.completions.create(model=BASE, messages=HI, tools=[tool])


async def test_calls_of_earlier_turns_are_written_as_the_model_writes_them(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(f"</think>{written(ARGUMENTS)}", "</think>Done.")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls or ()
    turns: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "written"},
    ]
    await openai.chat.completions.create(model=BASE, messages=[*HI, *turns], tools=[TOOL])
    assert written(ARGUMENTS) in text_model.decode(house.engine.requests[1].prompt_token_ids, False)
