"""/v1/responses with the real openai client: whole, streamed, with former items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.responses import Response, ResponseOutputMessage
from pydantic import BaseModel

from lora_serve.core.errors import InternalError
from lora_serve.core.request import FinishReason
from tests.mock_engine import MockReply

Ids = Callable[[str], tuple[int, ...]]
BASE = "tiny-base"
TEXT = "Hello wörld 😀"


@pytest.fixture
def prompts(house: Any, text_model: Any) -> Callable[[], list[str]]:
    """The prompts that the engine got, as text."""
    return lambda: [text_model.decode(r.prompt_token_ids, skip_special_tokens=False) for r in house.engine.requests]


def says(house: Any, ids: Ids, text: str, **reply: Any) -> None:
    house.engine.script = lambda request: MockReply(token_ids=ids(text), **{"finish": FinishReason.STOP, **reply})


async def chat_prompt(http: aiohttp.ClientSession, messages: list[Any], prompts: Callable[[], list[str]]) -> str:
    """The prompt of the same messages as a chat."""
    async with http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}) as answer:
        assert answer.status == 200, await answer.text()
    return prompts()[-1]


async def test_answer_is_one_message(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    says(house, ids, TEXT, num_cached_tokens=2)
    answer = await openai.responses.create(model=BASE, input="Say it", metadata={"mine": "1"}, user="me")
    assert (answer.output_text, answer.status, answer.object, answer.model) == (TEXT, "completed", "response", BASE)
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status, answer.metadata) == ("assistant", "completed", {"mine": "1"})
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(ids(TEXT))
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert Response.model_validate(answer.to_dict()).id.startswith("resp_")
    assert house.engine.requests[0].sampling.max_tokens > 64, "left out, what the context leaves"


async def test_events_come_in_openais_order_and_add_up(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    says(house, ids, TEXT)
    async with openai.responses.stream(model=BASE, input="Say it") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    names = list(dict.fromkeys(event.type for event in events))
    assert names == [
        f"response.{name}"
        for name in (
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "completed",
        )
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert final.output_text == TEXT
    assert final.usage is not None
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


async def test_stream_is_made_of_named_events_without_done(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    says(house, ids, "ab")
    async with http.post("/v1/responses", json={"input": "x", "stream": True}) as answer:
        text = await answer.text()
    assert text.startswith('event: response.created\ndata: {"type":"response.created","sequence_number":0,')
    assert "[DONE]" not in text
    assert text.endswith("\n\n")


async def test_answer_that_is_cut_is_incomplete(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    says(house, ids, TEXT, finish=None)
    answer = await openai.responses.create(model=BASE, input="x", max_output_tokens=3)
    assert house.engine.requests[0].sampling.max_tokens == 3
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = await openai.responses.create(model=BASE, input="x", max_output_tokens=3, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_answer_without_text_is_an_empty_message(openai: AsyncOpenAI, house: Any) -> None:
    house.engine.script = lambda request: MockReply(token_ids=(), finish=FinishReason.STOP)
    answer = await openai.responses.create(model=BASE, input="x")
    assert (answer.output_text, len(answer.output)) == ("", 1)
    stream = await openai.responses.create(model=BASE, input="x", stream=True)
    assert [event.type async for event in stream][-1] == "response.completed"


async def test_input_in_full_is_the_same_chat(
    openai: AsyncOpenAI, http: aiohttp.ClientSession, house: Any, ids: Ids, prompts: Callable[[], list[str]]
) -> None:
    """The output of one answer goes into the next `input` as it is."""
    says(house, ids, "Paris")
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "The capital?"}]}
    first = await openai.responses.create(model=BASE, instructions="Be short.", input=[question])
    items: list[Any] = [question, *(item.to_dict() for item in first.output), {"role": "user", "content": "Sure?"}]
    await openai.responses.create(model=BASE, instructions="Be short.", input=items)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "The capital?"},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "Sure?"},
    ]
    assert prompts()[-1] == await chat_prompt(http, messages, prompts)


@pytest.mark.parametrize("text", ["ab", "\N{GRINNING FACE}b"])  # its first character takes several tokens
async def test_logprobs_are_included(openai: AsyncOpenAI, house: Any, ids: Ids, text: str) -> None:
    says(house, ids, text)
    asked: Any = {"model": BASE, "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await openai.responses.create(**asked)
    (content,) = answer.output[0].content  # type: ignore[union-attr]
    assert [len(entry.top_logprobs) for entry in content.logprobs] == [2] * len(ids(text))  # type: ignore[union-attr]
    events = [event async for event in await openai.responses.create(**asked, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert sum(len(event.logprobs) for event in deltas) == len(ids(text))


async def test_sampling_fields_reach_the_engine(http: aiohttp.ClientSession, house: Any) -> None:
    body = {"input": "x", "temperature": 0.5, "top_p": 0.25, "top_k": 4, "seed": 9, "stop": "END", "user": 5}
    async with http.post("/v1/responses", json=body) as answer:
        assert answer.status == 200, await answer.text()
    sampling = house.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 4, 9)


REFUSED = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "input"),
    "conversation": ({"conversation": "c"}, "input"),
    "background": ({"background": True}, "stored"),
    "include": ({"include": ["my.thoughts"]}, "include"),
    "input": ({"input": []}, "items"),
    "input[0]": ({"input": [{"type": "item_reference", "id": "x"}]}, "stored"),
    "input[0].content[0]": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "texts"),
    "input[0].role": ({"input": [{"role": "king", "content": "x"}]}, "role"),
    "text.format": ({"text": {"format": {"type": "poem"}}}, "json_schema"),
    "tools[0]": ({"tools": [{"name": "f"}]}, "function"),
    "max_output_tokens": ({"max_output_tokens": 500}, "context length"),
    "temperature": ({"temperature": 3}, "2"),
}


@pytest.mark.many(5)
@pytest.mark.parametrize("param", REFUSED)
async def test_wrong_field_is_refused_by_its_own_name(openai: AsyncOpenAI, param: str) -> None:
    change, words = REFUSED[param]
    with pytest.raises(BadRequestError) as caught:
        await openai.responses.create(**{"model": BASE, "input": "x", **change})
    assert caught.value.param == param
    assert words in caught.value.message
    assert "messages" not in caught.value.message


async def test_store_false_is_what_happens_anyway(openai: AsyncOpenAI) -> None:
    answer = await openai.responses.create(model=BASE, input="x", store=False, max_output_tokens=1)
    assert answer.to_dict()["store"] is False


async def test_error_in_the_middle_is_an_event(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    says(house, ids, TEXT, error=InternalError("oops"), error_after=2)
    events = [event async for event in await openai.responses.create(model=BASE, input="x", stream=True)]
    assert events[-1].type == "error"
    assert events[-1].code == "internal_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))


class City(BaseModel):
    name: str
    population: int


async def test_text_is_parsed_by_the_clients_own_schema(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    says(house, ids, '{"name":"Bonn","population":7}')
    answer = await openai.responses.parse(model=BASE, input="x", text_format=City)
    assert answer.output_parsed == City(name="Bonn", population=7)
    grammar = house.engine.requests[0].grammar
    async with openai.chat.completions.stream(
        model=BASE, messages=[{"role": "user", "content": "x"}], response_format=City
    ) as stream:
        await stream.until_done()
    assert grammar == house.engine.requests[1].grammar
    assert "population" in grammar.text
    with pytest.raises(BadRequestError) as caught:
        await openai.responses.create(
            model=BASE, input="x", text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}
        )
    assert caught.value.param is not None
    assert caught.value.param.startswith("text.format")
