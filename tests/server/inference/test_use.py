"""usage.prompt_tokens_details.cached_tokens, as OpenAI and vLLM send it."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from lora_serve.core.messages import PromptEvent, Timings
from lora_serve.core.request import InferenceRequest
from lora_serve.tenancy.usage import AnswerUse
from tests.mock_engine import MockReply

BASE = "tiny-base"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def found(num_cached_tokens: int) -> Any:
    return lambda request: MockReply(num_cached_tokens=num_cached_tokens)


@pytest.mark.parametrize("num_cached", [0, 3])
async def test_cached_tokens_are_in_every_answer_none_or_not(openai: AsyncOpenAI, house: Any, num_cached: int) -> None:
    house.engine.script = found(num_cached)
    chat = await openai.chat.completions.create(model=BASE, messages=HI, max_tokens=2, n=2)
    text = await openai.completions.create(model=BASE, prompt=[[1, 2, 3, 4], [5, 6, 7, 8]], max_tokens=2, n=2)
    for answer, expected in ((chat, num_cached), (text, 2 * num_cached)):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"messages": HI}], ids=["completions", "chat"])
async def test_cached_tokens_are_in_the_usage_of_a_stream(
    http: aiohttp.ClientSession, house: Any, body: dict[str, Any]
) -> None:
    house.engine.script = found(2)
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with http.post(path, json={**body, "max_tokens": 2, "stream": True, "stream_options": options}) as answer:
        text = await answer.text()
    chunks = [json.loads(block.removeprefix("data: ")) for block in text.split("\n\n")[:-2]]
    assert len(chunks) > 2
    assert all(chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 2} for chunk in chunks)


def test_prompt_counts_its_cached_tokens_once_and_never_more_than_it_has() -> None:
    requests = [InferenceRequest(f"r{index}", (1,) * length) for index, length in enumerate((9, 9, 5, 5))]
    use = AnswerUse(requests, choices_per_prompt=2)
    for choice, num_cached in enumerate((4, 8, 0, 4)):
        use.prompt_computed(choice, PromptEvent(f"r{choice}", Timings(0.0, 0.0, 0.0), None, num_cached))
    num_prompt_tokens, _, num_cached_tokens = use.counts()
    assert (num_prompt_tokens, num_cached_tokens) == (14, 4)
    assert use.counts(1)[2] == 8
