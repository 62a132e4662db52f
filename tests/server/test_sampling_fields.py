"""Fields of vLLM's and OpenAI's requests beyond the common ones: each does what it says, or is refused in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError

from lora_serve.core.messages import TokenLogprobs
from lora_serve.server.schemas.fields import Refused, marked
from lora_serve.server.schemas.inference import ChatFields, CompletionFields
from tests.mock_engine import MockReply

Ids = Callable[[str], tuple[int, ...]]
BASE = "tiny-base"
CHAT = {"messages": [{"role": "user", "content": "Hello there, how are you?"}]}


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def complete(http: aiohttp.ClientSession, **body: Any) -> Any:
    status, answer = await post(http, "/v1/completions", {"prompt": "x", **body})
    assert status == 200, answer
    return answer


async def refusal(http: aiohttp.ClientSession, path: str = "/v1/completions", **body: Any) -> str:
    base = CHAT if "chat" in path else {"prompt": "x"}
    status, answer = await post(http, path, {**base, **body})
    assert status == 400, answer
    assert answer["error"]["param"] in answer["error"]["message"]
    return str(answer["error"]["message"])


async def test_best_of_shows_the_answers_with_the_best_mean_logprob(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    """A longer answer is not worse for being longer: the mean counts, not the sum."""
    texts = {4: ("poor", -2.0), 5: ("the best of all", -0.5), 6: ("good", -0.75), 7: ("worst", -3.0)}
    house.engine.script = lambda request: MockReply(token_ids=ids(texts[request.sampling.seed][0]))
    numbers = {number: of for text, of in texts.values() for number in ids(text)}

    def logprobs(request: Any, token_id: int) -> TokenLogprobs | None:
        assert request.sampling.logprobs is not None
        return TokenLogprobs(token_id, texts[request.sampling.seed][1], 1, ())

    assert numbers
    house.engine._logprobs = logprobs
    answer = await openai.completions.create(model=BASE, prompt="x", n=2, best_of=4, seed=4, max_tokens=50)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "the best of all"), (1, "good")]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(ids(text)) for text, _ in texts.values())


async def test_best_of_is_per_prompt(openai: AsyncOpenAI, house: Any) -> None:
    answer = await openai.completions.create(model=BASE, prompt=["a", "b"], best_of=3, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(house.engine.requests) == 6


async def test_best_of_that_equals_n_changes_nothing(openai: AsyncOpenAI, house: Any) -> None:
    await openai.completions.create(model=BASE, prompt="a", n=2, best_of=2, max_tokens=2)
    assert [request.sampling.logprobs for request in house.engine.requests] == [None, None]


async def test_best_of_below_n_and_in_a_stream_is_refused(http: aiohttp.ClientSession) -> None:
    assert "n" in await refusal(http, n=3, best_of=2)
    assert "stream" in await refusal(http, best_of=2, stream=True)
    assert "--max-n" in await refusal(http, best_of=17)
    assert "/v1/completions" in await refusal(http, "/v1/chat/completions", best_of=2)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("side", ["left", "right"])
async def test_prompt_is_cut(http: aiohttp.ClientSession, house: Any, path: str, side: str) -> None:
    body = CHAT if "chat" in path else {"prompt": "one two three four five"}
    for extra in ({}, {"truncate_prompt_tokens": 3, "truncation_side": side}):
        status, _ = await post(http, path, {**body, "max_tokens": 2, **extra})
        assert status == 200
    whole, cut = (request.prompt_token_ids for request in house.engine.requests)
    assert cut == (whole[-3:] if side == "left" else whole[:3])


async def test_cut_to_the_models_length_leaves_room_for_the_answer(http: aiohttp.ClientSession, house: Any) -> None:
    prompt = [3 + number % 50 for number in range(500)]
    await complete(http, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=10)
    (request,) = house.engine.requests
    assert request.prompt_token_ids == tuple(prompt[-(128 - 10) :])
    long = {"messages": [{"role": "user", "content": "word " * 500}], "truncate_prompt_tokens": -1}
    assert (await post(http, "/v1/chat/completions", long))[0] == 200
    assert len(house.engine.requests[1].prompt_token_ids) == 127
    assert "1 to 128" in await refusal(http, truncate_prompt_tokens=129)
    assert "1 to 128" in await refusal(http, truncate_prompt_tokens=0)


async def test_echo_shows_the_prompt_as_it_was_cut(http: aiohttp.ClientSession, text_model: Any, ids: Ids) -> None:
    answer = await complete(http, prompt="one two", truncate_prompt_tokens=2, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == text_model.decode(ids("one two")[-2:])
    assert answer["usage"]["prompt_tokens"] == 2


async def test_bad_words_are_tokens_with_and_without_a_space(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    await complete(http, bad_words=["hello", " z"], max_tokens=1)
    (request,) = house.engine.requests
    words = request.sampling.bad_words
    assert words[0] == ids("hello")
    assert ids("z") in words
    for word in ("hello", "z"):
        spaced = ids(f" {word}")
        is_one_more = len(spaced) == len(ids(word)) and spaced[0] != ids(word)[0]
        assert (spaced in words) == is_one_more
    assert "1 to 64" in await refusal(http, bad_words=["  "])


async def test_allowed_ids_are_checked(http: aiohttp.ClientSession, house: Any, spec: Any) -> None:
    await complete(http, allowed_token_ids=[5, 6, 5], max_tokens=1)
    assert house.engine.requests[0].sampling.allowed_token_ids == (5, 6)
    assert "1 to 1024" in await refusal(http, allowed_token_ids=[])
    assert str(spec.vocab_size) in await refusal(http, allowed_token_ids=[spec.vocab_size])


async def test_bias_by_text_means_exactly_one_token(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    (number,) = ids("z")
    await complete(http, logit_bias={"z": 3, "5": -1}, max_tokens=1)
    assert house.engine.requests[0].sampling.logit_bias == ((number, 3.0), (5, -1.0))
    assert "exactly one token" in await refusal(http, logit_bias={"zebra crossing": 1})
    assert "token" in await refusal(http, logit_bias={"": 1})


async def test_salted_prompts_find_only_those_with_the_same_salt(http: aiohttp.ClientSession, house: Any) -> None:
    for salt in (None, "one", "one", "two"):
        await complete(http, cache_salt=salt, max_tokens=1)
    plain, one, again, two = (request.cache_scope or request.tenant for request in house.engine.requests)
    assert one == again
    assert len({plain, one, two}) == 3
    assert one.startswith(plain)
    assert [request.is_salted for request in house.engine.requests] == [False, True, True, True]


async def test_token_ids_come_with_the_answer(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    house.engine.script = lambda request: MockReply(token_ids=ids("Hello wörld"))
    answer = await complete(http, prompt=[5, 6], n=2, return_token_ids=True, max_tokens=50)
    for choice in answer["choices"]:
        assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], list(ids("Hello wörld")))
    assert "token_ids" not in (await complete(http, max_tokens=1))["choices"][0]


async def test_streamed_token_ids_add_up(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = lambda request: MockReply(token_ids=ids("Hello wörld 😀"))
    extra = {"return_token_ids": True}
    stream = await openai.completions.create(model=BASE, prompt=[5], max_tokens=50, stream=True, extra_body=extra)
    parts = [chunk.choices[0].model_extra or {} async for chunk in stream]
    assert [number for part in parts for number in part["token_ids"]] == list(ids("Hello wörld 😀"))
    assert [part.get("prompt_token_ids") for part in parts] == [[5], *[None] * (len(parts) - 1)]


async def test_token_ids_come_with_a_chat(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = lambda request: MockReply(token_ids=ids("Hello wörld 😀"))
    asked: Any = {"model": BASE, **CHAT, "n": 2, "max_tokens": 50, "extra_body": {"return_token_ids": True}}
    answer = (await openai.chat.completions.create(**asked)).to_dict()
    prompt = list(house.engine.requests[0].prompt_token_ids)
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [list(ids("Hello wörld 😀"))] * 2  # type: ignore[attr-defined]
    chunks = [chunk.to_dict() async for chunk in await openai.chat.completions.create(**asked, stream=True)]
    found: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            found[choice["index"]] += choice["token_ids"]
    assert list(found.values()) == [list(ids("Hello wörld 😀"))] * 2
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt] * 2


async def test_prompt_logprobs_in_a_stream_are_refused(http: aiohttp.ClientSession) -> None:
    assert "stream" in await refusal(http, prompt_logprobs=1, stream=True)


async def test_newer_name_of_max_tokens_counts_in_completions_too(http: aiohttp.ClientSession, house: Any) -> None:
    await complete(http, max_tokens=5, max_completion_tokens=3)
    assert house.engine.requests[0].sampling.max_tokens == 3


MARKED = [
    (path, name, mark)
    for path, schema in (("/v1/completions", CompletionFields), ("/v1/chat/completions", ChatFields))
    for name, mark in marked(schema.model_fields).items()
]


@pytest.mark.many(25)
@pytest.mark.parametrize(("path", "name", "mark"), MARKED, ids=[f"{path}:{name}" for path, name, _ in MARKED])
async def test_marked_field_is_refused_in_words_or_ignored(
    http: aiohttp.ClientSession, path: str, name: str, mark: Any
) -> None:
    base = CHAT if "chat" in path else {"prompt": "x"}
    status, answer = await post(http, path, {**base, "max_tokens": 1, name: {"any": "value"}})
    if not isinstance(mark, Refused):
        assert status == 200, answer
        return
    assert (status, answer["error"]["param"]) == (400, name)
    assert mark.why in answer["error"]["message"]
    for value in (None, *mark.harmless):
        status, answer = await post(http, path, {**base, "max_tokens": 1, name: value})
        assert status == 200, answer


async def test_suffix_is_refused_by_the_openai_client_too(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="suffix"):
        await openai.completions.create(model=BASE, prompt="x", suffix="end")


async def test_usage_tells_details(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(model=BASE, prompt="x", max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert math.isclose(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
