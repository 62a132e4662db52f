"""Reasoning with the real openai client: apart from the content, whole and streamed, and before a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from openai import AsyncOpenAI
from tokenizers import AddedToken

from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import BASE
from tests.server.tools.conftest import Says, accepts
from tests.text.chat_families import byte_level, wrapped
from tests.text.tool_templates import QWEN_2_5

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
# As Qwen 3's: the model thinks unless it is told not to; and as DeepSeek R1's: the template begins the thinking.
END = (
    "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- elif add_generation_prompt and begin is defined %}{{ '<think>\\n' }}{%- endif %}"
)


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    added = [AddedToken(token, special=True, normalized=False) for token in ("<|im_start|>", "<|im_end|>")]
    others = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    added += [AddedToken(token, special=token == "<think>", normalized=False) for token in others]
    return TextModel(wrapped(byte_level(added), QWEN_2_5 + END, bos=None, eos="<|im_end|>"))


async def message_of(openai: AsyncOpenAI, **body: Any) -> tuple[Any, Any, Any]:
    """Content, reasoning and the names of the tools called; the same whole and streamed."""
    whole = (await openai.chat.completions.create(model=BASE, messages=HI, **body)).choices[0].message
    content = reasoning = ""
    names = []
    async for chunk in await openai.chat.completions.create(model=BASE, messages=HI, stream=True, **body):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        piece = getattr(delta, "reasoning_content", None) or ""
        assert piece == (getattr(delta, "reasoning", None) or "")
        reasoning += piece
        names += [call.function.name for call in delta.tool_calls or () if call.function and call.function.name]
    found = getattr(whole, "reasoning_content", None)
    assert found == getattr(whole, "reasoning", None)
    assert (content, reasoning) == (whole.content or "", found or "")
    assert names == [call.function.name for call in whole.tool_calls or ()]
    return whole.content, found, names


async def test_reasoning_stands_apart_from_content_and_calls(openai: AsyncOpenAI, says: Says) -> None:
    says("<think>\nHm, why?\n</think>\n\nBecause.")
    content, reasoning, _ = await message_of(openai)
    assert (content.strip(), reasoning.strip()) == ("Because.", "Hm, why?")
    says(f"<think>\nA {CALL}?\n</think>\n\n{CALL}")
    content, reasoning, names = await message_of(openai, tools=[TOOL])
    assert (content, names) == (None, ["now"])
    assert CALL in reasoning


async def test_answer_without_reasoning_is_content(openai: AsyncOpenAI, says: Says) -> None:
    says("Because.")
    assert await message_of(openai) == ("Because.", None, [])


async def test_reasoning_that_the_prompt_begins_needs_no_marker(openai: AsyncOpenAI, says: Says) -> None:
    says("Hm.</think>Because.")
    body = {"extra_body": {"chat_template_kwargs": {"begin": True}}}
    assert await message_of(openai, **body) == ("Because.", "Hm.", [])
    assert (await message_of(openai))[1] is None  # else it is the model's text


async def test_reasoning_that_is_cut_is_no_content(openai: AsyncOpenAI, says: Says) -> None:
    says("<think>Hm", end=False)
    answer = await openai.chat.completions.create(model=BASE, messages=HI)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "length")


async def test_reasoning_can_be_left_out(openai: AsyncOpenAI, says: Says) -> None:
    says("<think>Hm.</think>Because.")
    assert await message_of(openai, extra_body={"include_reasoning": False}) == ("Because.", None, [])


async def test_no_effort_is_no_thinking_for_the_template(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says("Because.")
    await openai.chat.completions.create(model=BASE, messages=HI, reasoning_effort="none")
    await openai.chat.completions.create(model=BASE, messages=HI, reasoning_effort="high")
    without, thinking = (text_model.decode(request.prompt_token_ids, False) for request in house.engine.requests)
    assert without == f"{thinking}<think>\n\n</think>\n\n"


async def test_values_for_the_template_may_be_nested(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says("Well.")
    values = {"begin": {"a": [1, None, {"b": "<|im_end|>"}]}}
    await openai.chat.completions.create(model=BASE, messages=HI, extra_body={"chat_template_kwargs": values})
    assert text_model.decode(house.engine.requests[0].prompt_token_ids, False).endswith("<think>\n")


async def test_answer_of_a_given_form_comes_after_the_reasoning(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says("<think>Hm.</think>{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    await openai.chat.completions.create(model=BASE, messages=HI, **body)
    await openai.chat.completions.create(
        model=BASE, messages=HI, **body, extra_body={"chat_template_kwargs": {"begin": True}}
    )
    await openai.chat.completions.create(model=BASE, messages=HI, **body, tools=[TOOL])
    closed, opened, with_tools = (request.grammar for request in house.engine.requests)
    json_text = json.dumps({"a": 1})
    for text, may_be in (
        (json_text, (True, False, True)),
        (f"<think>Well {{</think>\n\n{json_text}", (True, True, True)),
        (f"Well.</think>{json_text}", (False, True, False)),
        ("<think>Well.</think>Well.", (False, False, False)),
        (f"<think>Well.</think>{CALL}", (False, False, True)),
    ):
        assert tuple(accepts(text_model, found, text) for found in (closed, opened, with_tools)) == may_be, text


async def test_forced_call_comes_after_the_reasoning(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(CALL)
    await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL], tool_choice="required")
    (request,) = house.engine.requests
    assert LLMatcher.validate_grammar(request.grammar.text) == ""
    assert accepts(text_model, request.grammar, f"<think>Well.</think>\n{CALL}")
    assert accepts(text_model, request.grammar, CALL)
    assert not accepts(text_model, request.grammar, "<think>Well.</think>Well.")
