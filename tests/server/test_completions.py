"""/v1/completions with the real openai client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from lora_serve.core.request import FinishReason
from lora_serve.text.tokenizer import TextModel
from tests.mock_engine import MockReply

Ids = Callable[[str], tuple[int, ...]]
BASE = "tiny-base"


def says(ids: Ids, text: str, **reply: Any) -> Callable[[Any], MockReply]:
    return lambda request: MockReply(token_ids=ids(text), **reply)


async def test_text_of_the_tokens_comes_back(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "Hello wörld 😀")
    answer = await openai.completions.create(model=BASE, prompt="Say it", max_tokens=50)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == ("Hello wörld 😀", "length", 0)
    assert answer.object == "text_completion"
    assert answer.model == BASE
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids("Hello wörld 😀"))
    assert answer.usage.prompt_tokens == len(ids("Say it")) + 1  # and <s>


async def test_defaults_are_openais(openai: AsyncOpenAI, house: Any) -> None:
    await openai.completions.create(model=BASE, prompt="x")
    sampling = house.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (16, 1.0, 1.0, None)
    assert house.engine.requests[0].adapters == ()


async def test_every_sampling_field_reaches_the_engine(http: aiohttp.ClientSession, house: Any) -> None:
    body = {
        "model": BASE, "prompt": [5, 6], "max_tokens": 9, "min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 7,
        "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "seed": 11,
        "logit_bias": {"3": 2, "4": -500}, "stop_token_ids": [8, 8, 9], "ignore_eos": True, "logprobs": 2,
        "prompt_logprobs": 1, "priority": -3, "timeout_ms": 5000, "max_cold_wait_ms": 250, "on_cold": "fail",
    }  # fmt: skip
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
    request = house.engine.requests[0]
    sampling = request.sampling
    assert request.prompt_token_ids == (5, 6)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 2, 0.0)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (sampling.seed, sampling.logit_bias) == (11, ((3, 2.0), (4, -100.0)))
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((8, 9), True)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 1)
    assert (request.priority, request.on_cold, request.max_cold_wait) == (-3, "fail", 0.25)
    assert request.deadline == pytest.approx(request.arrival_time + 5.0)


async def test_null_is_the_same_as_missing(http: aiohttp.ClientSession, house: Any) -> None:
    fields = ["temperature", "top_p", "n", "stop", "logprobs", "seed", "logit_bias", "stream", "stream_options", "echo"]
    body = {"model": None, "prompt": "x", "max_tokens": None, **dict.fromkeys(fields)}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
    assert house.engine.requests[0].sampling.max_tokens == 16


async def test_unknown_fields_are_ignored(http: aiohttp.ClientSession) -> None:
    body = {"prompt": "x", "best_friend": [1, {"a": 2}], "user": 7, "max_tokens": 1}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(0, "ab")]),
        (["ab", "c"], [(0, "ab"), (0, "c")]),
        ([7, 8, 9], [(7, 8, 9)]),
        ([[7, 8], [9]], [(7, 8), (9,)]),
    ],
)
async def test_prompt_may_have_each_of_the_four_forms(
    openai: AsyncOpenAI, house: Any, ids: Ids, prompt: Any, expected: list[Any]
) -> None:
    answer = await openai.completions.create(model=BASE, prompt=prompt, max_tokens=1)
    wanted = [(item[0], *ids(item[1])) if isinstance(item[-1], str) else item for item in expected]
    assert [request.prompt_token_ids for request in house.engine.requests] == wanted
    assert [choice.index for choice in answer.choices] == list(range(len(wanted)))


async def test_special_tokens_may_be_left_out(http: aiohttp.ClientSession, house: Any, ids: Ids) -> None:
    body = {"prompt": "ab", "add_special_tokens": False, "max_tokens": 1}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
    assert house.engine.requests[0].prompt_token_ids == ids("ab")


async def test_prompts_times_n_are_numbered_prompt_by_prompt(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = lambda request: MockReply(
        token_ids=ids(f"{len(request.prompt_token_ids)}{request.sampling.seed}"),
        delay=0.01 / len(request.prompt_token_ids),  # the later prompts answer first
    )
    answer = await openai.completions.create(model=BASE, prompt=[[1], [1, 2], [1, 2, 3]], n=2, seed=4)
    assert [choice.text for choice in answer.choices] == ["14", "15", "24", "25", "34", "35"]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1 + 2 + 3
    assert len({request.request_id for request in house.engine.requests}) == 6


async def test_stop_string_is_cut_and_frees_the_row(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "one two STOP three four")
    kept, generate = [], house.engine.infer

    def keep(request: Any) -> Any:
        """An iterator that is held somewhere is not closed by the garbage collector."""
        kept.append(generate(request))
        return kept[-1]

    house.engine.infer = keep
    answer = await openai.completions.create(model=BASE, prompt="x", max_tokens=50, stop=["STOP"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two ", "stop")
    assert answer.choices[0].stop_reason == "STOP"  # type: ignore[attr-defined]
    assert len(house.engine.aborted) == 1


async def test_stop_string_may_be_included(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "one STOP two")
    body = {"include_stop_str_in_output": True}
    answer = await openai.completions.create(model=BASE, prompt="x", max_tokens=50, stop="STOP", extra_body=body)
    assert answer.choices[0].text == "one STOP"


async def test_stop_strings_do_not_count_before_min_tokens(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "ab" * 10)
    count = len(ids("ab" * 10)) - 1
    body = {"min_tokens": count}
    answer = await openai.completions.create(model=BASE, prompt="x", max_tokens=50, stop="b", extra_body=body)
    assert len(answer.choices[0].text) > 5


async def test_end_of_text_ends_with_stop_and_is_not_shown(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "done<|end|>more")
    body = {"skip_special_tokens": False}
    answer = await openai.completions.create(model=BASE, prompt="x", max_tokens=50, extra_body=body)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("done", "stop")
    assert answer.choices[0].stop_reason is None  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids("done<|end|>"))


async def test_stop_token_id_is_told_and_its_text_is_not_shown(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "abcxdef")
    stop_id = ids("x")[0]
    body = {"stop_token_ids": [stop_id]}
    answer = await openai.completions.create(model=BASE, prompt="y", max_tokens=50, extra_body=body)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].stop_reason == stop_id  # type: ignore[attr-defined]


async def test_end_of_text_is_an_ordinary_token_if_ignored(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "a<|end|>b")
    body = {"ignore_eos": True, "skip_special_tokens": False}
    answer = await openai.completions.create(model=BASE, prompt="y", max_tokens=50, extra_body=body)
    assert answer.choices[0].text == "a<|end|>b"


async def test_engine_that_does_not_send_the_end_token_is_understood_too(
    openai: AsyncOpenAI, house: Any, ids: Ids
) -> None:
    end = ids("<|end|>")[0]
    house.engine.script = says(ids, "abc", finish=FinishReason.STOP, stop_token_id=end)
    answer = await openai.completions.create(model=BASE, prompt="y", max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")


async def test_logprobs_have_the_completions_format(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "The fox")
    answer = await openai.completions.create(model=BASE, prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "The fox"
    assert logprobs.token_logprobs == pytest.approx([-0.6931] * len(logprobs.tokens), abs=1e-3)
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:index])) for index in range(len(logprobs.tokens))]
    assert logprobs.top_logprobs is not None
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    assert all(1 <= len(top) <= 3 for top in logprobs.top_logprobs)


async def test_tokens_may_be_spelled_as_ids(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    house.engine.script = says(ids, "The fox")
    body = {"return_tokens_as_token_ids": True}
    answer = await openai.completions.create(model=BASE, prompt="x", logprobs=1, extra_body=body)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [f"token_id:{token_id}" for token_id in ids("The fox")]
    assert logprobs.top_logprobs is not None
    assert all(key.startswith("token_id:") for top in logprobs.top_logprobs for key in top)


async def test_scoring_as_lm_eval_does_it(openai: AsyncOpenAI, house: Any, ids: Ids) -> None:
    """echo, max_tokens 1, logprobs 1 -> prompt + 1 entries, the first without a logprob."""
    prompt = list(ids("The quick brown fox"))
    house.engine.script = says(ids, " jumps")
    answer = await openai.completions.create(model=BASE, prompt=[prompt], max_tokens=1, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text.startswith("The quick brown fox")
    for entries in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset):
        assert entries is not None
        assert len(entries) == len(prompt) + 1
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert None not in logprobs.token_logprobs[1:]


async def test_echo_alone_gives_the_prompt_and_nothing_else(openai: AsyncOpenAI, ids: Ids) -> None:
    prompt = list(ids("The quick brown fox"))
    answer = await openai.completions.create(model=BASE, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("The quick brown fox", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == len(prompt)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, len(prompt))


async def test_echo_gives_a_text_back_as_it_was_sent(openai: AsyncOpenAI) -> None:
    """Not as the tokenizer would spell it: the special token in it is no token of the answer."""
    answer = await openai.completions.create(model=BASE, prompt="a<|end|>b", max_tokens=0, echo=True)
    assert answer.choices[0].text == "a<|end|>b"


async def test_prompt_logprobs_have_vllms_format(http: aiohttp.ClientSession, text_model: TextModel) -> None:
    body = {"prompt": [10, 11], "prompt_logprobs": 1, "max_tokens": 1}
    async with http.post("/v1/completions", json=body) as answer:
        entries = (await answer.json())["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["11"]["rank"] == 1
    assert entries[1]["11"]["decoded_token"] == text_model.token_text(11)
    assert entries[1]["11"]["logprob"] == pytest.approx(-0.6931, abs=1e-3)


async def test_impossible_tokens_have_a_finite_logprob(http: aiohttp.ClientSession, house: Any) -> None:
    """JSON knows no -Infinity."""

    def infinite(request: Any, token_id: int) -> Any:
        from lora_serve.core.messages import TokenLogprobs

        return TokenLogprobs(token_id, float("-inf"), 9, ())

    house.engine._logprobs = infinite
    async with http.post("/v1/completions", json={"prompt": "x", "logprobs": 1, "max_tokens": 1}) as answer:
        text = await answer.text()
    assert "Infinity" not in text
    assert json.loads(text)["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_answer_names_who_answered_and_how_long_it_took(
    openai: AsyncOpenAI, house: Any, http: aiohttp.ClientSession
) -> None:
    ref = await house.register("acme/support")
    async with http.post("/v1/completions", json={"model": "acme/support", "prompt": "x"}) as answer:
        headers, body = answer.headers, await answer.json()
    assert body["model"] == "acme/support"
    assert headers["X-Adapter-Id"] == "acme/support"
    assert headers["X-Adapter-Version"] == "1"
    assert headers["X-Adapter-Digest"] == ref.digest
    assert body["id"] == "cmpl-" + headers["X-Request-Id"]
    timing = dict(part.split(";dur=") for part in headers["Server-Timing"].split(", "))
    assert {name: float(value) for name, value in timing.items() if name != "decode"} == {
        "queue": 1.0,
        "load": 2.0,
        "prefill": 3.0,
    }
    assert float(timing["decode"]) >= 0
    raw = await openai.completions.with_raw_response.create(model=BASE, prompt="x")
    assert [raw.headers[f"X-Adapter-{name}"] for name in ("Id", "Version", "Digest")] == [BASE, "0", "base"]


async def test_client_cannot_choose_the_servers_own_id(http: aiohttp.ClientSession, house: Any) -> None:
    body = {"prompt": "x", "request_id": "mine", "max_tokens": 1}
    async with http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as answer:
        assert answer.headers["X-Request-Id"] == "mine"
        assert (await answer.json())["id"] == f"cmpl-{house.engine.requests[0].answer_id}"
    assert "mine" not in house.engine.requests[0].request_id
