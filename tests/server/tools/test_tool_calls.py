"""Tool calls with the real openai client: whole and streamed."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import aiohttp
import openai as openai_package
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from pydantic import BaseModel

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.constraints import tool_use
from lora_serve.text.chat import parse_messages
from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import BASE
from tests.server.tools.conftest import Says, accepts

HI: list[Any] = [{"role": "user", "content": "How is the weather in Köln and Rom?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY},
}
KOELN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ROM = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


async def streamed(openai: AsyncOpenAI, **body: Any) -> list[Any]:
    return [chunk async for chunk in await openai.chat.completions.create(model=BASE, stream=True, **body)]


async def test_calls_are_given_apart_from_the_text(openai: AsyncOpenAI, says: Says) -> None:
    says(f"{KOELN}\n{ROM}")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER])
    (choice,) = answer.choices
    assert calls_of(choice.message) == [("get_weather", {"city": "Köln"}), ("get_weather", {"city": "Rom"})]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    ids = [call.id for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 2
    assert all(found.startswith("call_") for found in ids)
    assert {call.type for call in choice.message.tool_calls or ()} == {"function"}


async def test_text_before_a_call_is_the_content(openai: AsyncOpenAI, says: Says) -> None:
    says(f"I will look.\n{KOELN}")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER])
    assert (answer.choices[0].message.content or "").strip() == "I will look."
    assert len(answer.choices[0].message.tool_calls or ()) == 1


async def test_answer_without_a_call_is_text(openai: AsyncOpenAI, says: Says) -> None:
    says("It rains.")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER])
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It rains.", None, "stop")
    assert answer.model_dump()["choices"][0]["message"]["refusal"] is None


async def test_tools_are_in_the_prompt_as_the_template_writes_them(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says("Well.")
    await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER])
    expected = text_model.wrapper.apply_chat_template(HI, tools=[WEATHER], tokenize=True, add_generation_prompt=True)
    assert list(house.engine.requests[0].prompt_token_ids) == list(expected["input_ids"])


async def test_streamed_call_comes_as_openais_deltas(openai: AsyncOpenAI, says: Says) -> None:
    says(f"Hm.{KOELN}\n{ROM}")
    chunks = await streamed(openai, messages=HI, tools=[WEATHER])
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces: dict[int, list[Any]] = {}
    for chunk in chunks[1:]:
        for call in chunk.choices[0].delta.tool_calls or ():
            pieces.setdefault(call.index, []).append(call)
    assert sorted(pieces) == [0, 1]
    for first, *others in pieces.values():
        assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", "")
        assert first.id.startswith("call_")
        assert {(other.id, other.type, other.function.name) for other in others} == {(None, None, None)}
        assert len(others) > 1
    arguments = [json.loads("".join(call.function.arguments for call in calls)) for calls in pieces.values()]
    assert arguments == [{"city": "Köln"}, {"city": "Rom"}]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == "Hm."
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


async def test_every_choice_has_calls_of_its_own(openai: AsyncOpenAI, says: Says) -> None:
    for stream in (False, True):
        says(KOELN, ROM)
        if not stream:
            answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER], n=2)
            found = {str(calls_of(choice.message)) for choice in answer.choices}
        else:
            texts = ["", ""]
            for chunk in await streamed(openai, messages=HI, tools=[WEATHER], n=2):
                for call in chunk.choices[0].delta.tool_calls or ():
                    texts[chunk.choices[0].index] += call.function.arguments
            found = {str([("get_weather", json.loads(text))]) for text in texts}
        assert found == {str([("get_weather", {"city": city})]) for city in ("Köln", "Rom")}


async def test_logprobs_of_a_stream_are_those_of_the_whole_answer(openai: AsyncOpenAI, says: Says) -> None:
    says(f"Hm.{KOELN}")
    body: dict[str, Any] = {"messages": HI, "tools": [WEATHER], "logprobs": True, "top_logprobs": 1}
    whole = await openai.chat.completions.create(model=BASE, **body)
    chunks = await streamed(openai, **body)
    entries = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content or ()]
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content
    assert whole.usage is not None
    assert len(entries) == whole.usage.completion_tokens


async def test_call_that_is_cut_says_length(openai: AsyncOpenAI, says: Says, text_model: TextModel) -> None:
    says(KOELN)
    limit = len(text_model.encode(KOELN, False)) - 8
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER], max_tokens=limit)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["get_weather"]  # type: ignore[union-attr]
    chunks = await streamed(openai, messages=HI, tools=[WEATHER], max_tokens=limit)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_stop_string_ends_text_beside_tools(openai: AsyncOpenAI, says: Says) -> None:
    says("Well, STOP it rains.")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER], stop=["STOP"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Well, ", "stop")


async def test_usage_comes_last_in_a_stream_with_calls(openai: AsyncOpenAI, says: Says) -> None:
    says(KOELN)
    chunks = await streamed(openai, messages=HI, tools=[WEATHER], stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 5


async def test_without_parallel_calls_there_is_one(openai: AsyncOpenAI, says: Says) -> None:
    says(f"{KOELN}\n{ROM}")
    body: dict[str, Any] = {"messages": HI, "tools": [WEATHER], "parallel_tool_calls": False}
    answer = await openai.chat.completions.create(model=BASE, **body)
    assert calls_of(answer.choices[0].message) == [("get_weather", {"city": "Köln"})]
    indices = {
        call.index for chunk in await streamed(openai, **body) for call in chunk.choices[0].delta.tool_calls or ()
    }
    assert indices == {0}


@pytest.mark.parametrize("max_tokens", [None, 60])
async def test_answer_ends_with_its_only_call(
    openai: AsyncOpenAI, says: Says, text_model: TextModel, max_tokens: int | None
) -> None:
    """What would not be shown is neither generated nor counted, and the reason is not that it was cut."""
    says(f"{KOELN}\n{ROM * 20}")
    body: dict[str, Any] = {"messages": HI, "tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": max_tokens}
    answer = await openai.chat.completions.create(model=BASE, **body)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert calls_of(choice.message) == [("get_weather", {"city": "Köln"})]
    assert choice.message.content is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= len(text_model.encode(KOELN, False)) < 60
    chunks = await streamed(openai, **body)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    late = await openai.chat.completions.create(model=BASE, **body, extra_body={"min_tokens": 50})
    assert late.usage is not None
    assert 50 <= late.usage.completion_tokens < 60
    both = await openai.chat.completions.create(model=BASE, **{**body, "parallel_tool_calls": True, "max_tokens": None})
    assert len(both.choices[0].message.tool_calls or ()) > 1, "else there are as many as the model makes"


async def test_choice_none_leaves_calls_in_the_text(openai: AsyncOpenAI, says: Says, house: Any) -> None:
    says(KOELN)
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER], tool_choice="none")
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (KOELN, "stop", None)
    await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER])
    one, other = (request.prompt_token_ids for request in house.engine.requests)
    assert one == other


async def test_result_of_a_call_goes_back_into_the_chat(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(KOELN)
    first = await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER])
    message = first.choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "warm"}
    says("It is warm.")
    second = await openai.chat.completions.create(model=BASE, messages=[*HI, message, result], tools=[WEATHER])  # type: ignore[list-item]
    assert second.choices[0].message.content == "It is warm."
    prompt = text_model.decode(house.engine.requests[1].prompt_token_ids, False)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>' in prompt
    assert "<tool_response>\nwarm\n</tool_response><|im_end|>" in prompt


class Weather(BaseModel):
    """The weather."""

    city: str


async def test_openais_helpers_for_parsing_and_streaming_understand_the_calls(openai: AsyncOpenAI, says: Says) -> None:
    tool = openai_package.pydantic_function_tool(Weather, name="get_weather")
    says(KOELN)
    answer = await openai.chat.completions.parse(model=BASE, messages=HI, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Köln")
    seen = []
    async with openai.chat.completions.stream(model=BASE, messages=HI, tools=[tool]) as stream:
        async for event in stream:
            seen.append(event.type)
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Köln")
    assert final.choices[0].finish_reason == "tool_calls"
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(seen)


@pytest.mark.many(6)
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": {}}, "tools", "list"),
        ({"tools": [WEATHER] * 129}, "tools", "128"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "before it"),
        ({"tools": ["x"]}, "tools[0]", "function"),
        ({"tools": [{"type": 5}]}, "tools[0]", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "object"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name", "128"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]},
            "tools[0].function.description",
            "string",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
            "JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
            "JSON schema",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict", "true"),
        ({"tool_choice": "auto"}, "tool_choice", "beside `tools`"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "beside `tools`"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "must be"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice", "must be"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "name a tool"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "pay"}}},
            "tool_choice",
            "'pay', which is no function",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "older form"),
        ({"function_call": "auto"}, "function_call", "older form"),
    ],
)
async def test_wrong_tools_are_refused_in_words(
    http: aiohttp.ClientSession, house: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    async with http.post("/v1/chat/completions", json={"messages": HI, **fields}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert words in error["message"]
    assert house.engine.requests == []


async def test_tools_nested_beyond_reason_are_refused(http: aiohttp.ClientSession) -> None:
    deep: Any = {"type": "object"}
    for _ in range(80):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "a", "parameters": deep}}]
    async with http.post("/v1/chat/completions", json={"messages": HI, "tools": tools}) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("length", [60_000, 90_000])
async def test_tools_beyond_the_context_are_refused(http: aiohttp.ClientSession, house: Any, length: int) -> None:
    tools = [{"type": "function", "function": {"name": "a", "description": "a" * length}}]
    async with http.post("/v1/chat/completions", json={"messages": HI, "tools": tools}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (400, "context_length_exceeded")
    assert house.engine.requests == []


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["function", "auto", "tool", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "function", "name", "parameters", "role", "tool_calls", "x"]), inner)
    ),
    max_leaves=12,
)


@given(JSON, JSON, JSON)
def test_any_values_are_tools_and_messages_or_refused(tools: Any, choice: Any, message: Any) -> None:
    for work in (
        lambda: tool_use(tools, choice, True),
        lambda: tool_use([WEATHER], choice, True),
        lambda: tool_use([{"type": "function", "function": tools}], None, True),
        lambda: parse_messages([message]),
        lambda: parse_messages([{"role": "assistant", "content": choice, "tool_calls": [message, tools]}]),
    ):
        with suppress(InvalidRequestError):
            work()


async def test_allowed_tools_are_all_that_the_model_hears_of(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says("Well.")
    pay: Any = {"type": "function", "function": {"name": "pay"}}
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "pay"}}]},
    }
    await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER, pay], tool_choice=choice)
    prompt = text_model.decode(house.engine.requests[0].prompt_token_ids, False)
    assert "pay" in prompt
    assert "get_weather" not in prompt


async def test_no_tools_is_no_tools(openai: AsyncOpenAI, says: Says) -> None:
    says(KOELN)
    for fields in ({"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        answer = await openai.chat.completions.create(model=BASE, messages=HI, extra_body=fields)
        assert answer.choices[0].message.content == KOELN


async def test_prompt_with_tools_can_be_tokenised(openai: AsyncOpenAI, http: Any, says: Says, house: Any) -> None:
    says("Well.")
    await openai.chat.completions.create(model=BASE, messages=HI, tools=[WEATHER])
    async with http.post("/tokenize", json={"messages": HI, "tools": [WEATHER]}) as answer:
        assert (await answer.json())["tokens"] == list(house.engine.requests[0].prompt_token_ids)


async def test_required_call_is_forced_by_a_grammar(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(KOELN)
    pay: Any = {"type": "function", "function": {"name": "pay", "parameters": {**CITY, "properties": {"city": {}}}}}
    named: Any = {"type": "function", "function": {"name": "pay"}}
    body: dict[str, Any] = {"model": BASE, "messages": HI, "tools": [WEATHER, pay]}
    any_tool = await openai.chat.completions.create(**body, tool_choice="required")
    await openai.chat.completions.create(**body, tool_choice="required", parallel_tool_calls=False)
    forced = await openai.chat.completions.create(**body, tool_choice=named)
    await openai.chat.completions.create(**body)
    required, single, only_pay, free = (request.grammar for request in house.engine.requests)
    assert free is None
    paid = KOELN.replace("get_weather", "pay")
    for text, may_be in (
        (KOELN, (True, True, False)),
        (paid, (True, True, True)),
        (f"{KOELN}\n{paid}", (True, False, False)),
        (f"{paid}\n{paid}", (True, False, False)),
        ("It rains.", (False, False, False)),
        (KOELN.replace('"Köln"', "5"), (False, False, False)),
    ):
        assert tuple(accepts(text_model, found, text) for found in (required, single, only_pay)) == may_be, text
    assert any_tool.choices[0].finish_reason == "tool_calls"
    assert forced.choices[0].finish_reason == "stop"  # as OpenAI and vLLM have it for a named tool


@pytest.mark.parametrize("body", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
async def test_parameters_that_no_grammar_holds_are_refused_with_tool_and_place(
    openai: AsyncOpenAI, body: dict[str, Any]
) -> None:
    tags = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    tools: Any = [WEATHER, {"type": "function", "function": {"name": "tag", "parameters": tags}}]
    with pytest.raises(openai_package.BadRequestError) as caught:
        await openai.chat.completions.create(model=BASE, messages=HI, tools=tools, **body)
    assert caught.value.param == "tools"
    assert "`tools`: tag: `parameters` at #/properties/tags: not supported: `uniqueItems`" in caught.value.message


@pytest.mark.parametrize("properties", [5, {"a": {"type": 7}}, {"a": {"enum": 5}}, {"a": {"$ref": 5}}], ids=str)
async def test_parameters_that_are_no_schema_are_refused_in_words(openai: AsyncOpenAI, properties: Any) -> None:
    parameters = {"type": "object", "properties": properties}
    tools: Any = [{"type": "function", "function": {"name": "tag", "parameters": parameters}}]
    with pytest.raises(openai_package.BadRequestError) as caught:
        await openai.chat.completions.create(model=BASE, messages=HI, tools=tools, tool_choice="required")
    assert "`tools`: tag: `parameters`" in caught.value.message


async def test_required_call_with_another_form_is_refused(openai: AsyncOpenAI) -> None:
    with pytest.raises(openai_package.BadRequestError, match="cannot have a `response_format`"):
        await openai.chat.completions.create(
            model=BASE, messages=HI, tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"}
        )


async def test_answer_in_json_or_calls_are_both_allowed_beside_tools(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(KOELN)
    answer = await openai.chat.completions.create(
        model=BASE, messages=HI, tools=[WEATHER], response_format={"type": "json_object"}
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    grammar = house.engine.requests[0].grammar
    assert accepts(text_model, grammar, KOELN)
    assert accepts(text_model, grammar, '{"city": 1}')
    assert not accepts(text_model, grammar, "It rains.")
