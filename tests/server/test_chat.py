"""/v1/chat/completions with the real openai client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from lora_serve.text.tokenizer import TextModel
from tests.mock_engine import MockReply

Ids = Callable[[str], tuple[int, ...]]
BASE = "tiny-base"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def says(ids: Ids, text: str, **reply: Any) -> Callable[[Any], MockReply]:
    return lambda request: MockReply(token_ids=ids(text), **reply)


async def test_answer_is_the_assistants_message(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "Schöne Grüße!<|end|>")
    answer = await openai.chat.completions.create(model=BASE, messages=HI)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Schöne Grüße!")
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_prompt_is_the_models_template_without_further_special_tokens(
    openai: AsyncOpenAI, house: Any, text_model: TextModel
) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, *HI]
    await openai.chat.completions.create(model=BASE, messages=messages, max_tokens=1)
    expected = text_model.wrapper.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    expected_ids = expected if isinstance(expected, list) else expected["input_ids"]
    assert list(house.engine.requests[0].prompt_token_ids) == list(expected_ids)


async def test_answer_may_fill_the_context_unless_limited(openai: AsyncOpenAI, house: Any) -> None:
    await openai.chat.completions.create(model=BASE, messages=HI)
    await openai.chat.completions.create(model=BASE, messages=HI, max_tokens=7)
    await openai.chat.completions.create(model=BASE, messages=HI, max_completion_tokens=8, max_tokens=7)
    rest, seven, eight = house.engine.requests
    assert rest.sampling.max_tokens == 128 - len(rest.prompt_token_ids)
    assert (seven.sampling.max_tokens, eight.sampling.max_tokens) == (7, 8)


async def test_choices_of_a_seeded_request_differ_and_repeat(openai: AsyncOpenAI) -> None:
    first = await openai.chat.completions.create(model=BASE, messages=HI, n=3, seed=5, max_tokens=6)
    again = await openai.chat.completions.create(model=BASE, messages=HI, n=3, seed=5, max_tokens=6)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    assert first.usage is not None
    assert (first.usage.completion_tokens, first.usage.prompt_tokens) == (18, again.usage.prompt_tokens)  # type: ignore[union-attr]


async def test_logprobs_have_the_chat_format(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "The 😀")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "The 😀"
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].logprob == pytest.approx(-0.6931, abs=1e-3)


async def test_logprobs_without_alternatives(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "The")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content or []] == [[] for _ in ids("The")]


async def test_no_logprobs_unless_asked_for(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(model=BASE, messages=HI, max_tokens=1)
    assert answer.choices[0].logprobs is None


async def test_last_message_can_be_continued_and_echoed(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "lo")
    messages = [*HI, {"role": "assistant", "content": "Hel"}]
    body = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    answer = await openai.chat.completions.create(model=BASE, messages=messages, extra_body=body)
    assert answer.choices[0].message.content == "Hello"


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"tools": []},
        {"response_format": None, "tools": None, "tool_choice": None},
        {"guided_regex": None},
    ],
)
async def test_harmless_forms_of_later_features_are_taken(http: aiohttp.ClientSession, field: dict[str, Any]) -> None:
    async with http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1, **field}) as answer:
        assert answer.status == 200, await answer.text()
