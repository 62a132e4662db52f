"""Reasoning in /v1/responses and /v1/messages: an item, or a block, of its own; sent back it stands in the prompt."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import BASE
from tests.server.tools import test_reasoning
from tests.server.tools.conftest import Says

text_model = test_reasoning.text_model
THOUGHT = "<think>\nHm, why?\n</think>\n\nBecause."
HI: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_reasoning_is_an_item_before_the_message(openai: AsyncOpenAI, says: Says) -> None:
    says(THOUGHT)
    answer: Any = await openai.responses.create(model=BASE, input=HI)
    reasoning, message = answer.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert reasoning.content[0].text.strip() == "Hm, why?"
    assert answer.output_text.strip() == "Because."
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


async def test_streamed_reasoning_adds_up(openai: AsyncOpenAI, says: Says) -> None:
    says(THOUGHT)
    events: list[Any] = [event async for event in await openai.responses.create(model=BASE, input=HI, stream=True)]
    deltas = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    (done,) = [event for event in events if event.type == "response.reasoning_text.done"]
    assert deltas == done.text
    assert deltas.strip() == "Hm, why?"
    first = [event.type for event in events if event.type.startswith("response.output")].index(
        "response.output_item.done"
    )
    assert first == 1, "the reasoning is whole before the message begins"
    assert events[-1].response.output[0].content[0].text == deltas


async def test_items_of_a_turn_that_reasoned_are_one_message(openai: AsyncOpenAI, says: Says, house: Any) -> None:
    says(THOUGHT)
    first: Any = await openai.responses.create(model=BASE, input=HI)
    items = [*HI, *(item.to_dict() for item in first.output), *HI]
    await openai.responses.create(model=BASE, input=items)
    messages = [*HI, {"role": "assistant", "content": first.output_text}, *HI]
    await openai.chat.completions.create(model=BASE, messages=messages)
    assert house.engine.requests[1].prompt_token_ids == house.engine.requests[2].prompt_token_ids


async def test_effort_is_chats(openai: AsyncOpenAI, says: Says, house: Any) -> None:
    says("Because.")
    await openai.responses.create(model=BASE, input=HI, reasoning={"effort": "none"})
    await openai.chat.completions.create(model=BASE, messages=HI, reasoning_effort="none")
    assert house.engine.requests[0].prompt_token_ids == house.engine.requests[1].prompt_token_ids


async def test_usage_of_a_chat_counts_reasoning(openai: AsyncOpenAI, says: Says) -> None:
    says(THOUGHT)
    answer = await openai.chat.completions.create(model=BASE, messages=HI)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_a_block(http: aiohttp.ClientSession, says: Says, stream: bool) -> None:
    says(THOUGHT)
    async with http.post("/v1/messages", json={"messages": HI, "max_tokens": 99, "stream": stream}) as answer:
        text = await answer.text()
    if not stream:
        thinking, said = json.loads(text)["content"]
        assert (thinking["type"], thinking["thinking"].strip(), said["text"].strip()) == (
            "thinking",
            "Hm, why?",
            "Because.",
        )
        return
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    kinds = list(dict.fromkeys(event["delta"]["type"] for event in events if event["type"] == "content_block_delta"))
    assert kinds == ["thinking_delta", "signature_delta", "text_delta"]


async def test_disabled_thinking_is_chats(
    http: aiohttp.ClientSession, says: Says, house: Any, text_model: TextModel
) -> None:
    says("Because.")
    body = {"messages": HI, "max_tokens": 9, "thinking": {"type": "disabled"}}
    async with http.post("/v1/messages", json=body) as answer:
        assert answer.status == 200
    prompt = text_model.decode(house.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")
