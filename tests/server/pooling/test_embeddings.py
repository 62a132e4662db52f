"""POST /v1/embeddings, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError

from lora_serve.core.errors import AdapterUnavailableError, InternalError
from lora_serve.core.request import InferenceRequest, OnCold
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.server.pooling.embeddings import MAX_IN_FLIGHT
from lora_serve.text.tokenizer import TextModel
from tests.mock_engine import MockReply, derived_token_id
from tests.server.conftest import BASE
from tests.text.tiny_tokenizer import bert_tokenizer

PATH = "/v1/embeddings"


def vector_of(request: InferenceRequest) -> list[float]:
    """What the mock answers, as float32."""
    values = [derived_token_id(request, position, 2001) / 1000 - 1 for position in range(4)]
    return [float(value) for value in np.array(values, np.float32)]


async def test_floats_and_base64_are_the_same_numbers(openai: AsyncOpenAI, house: Any) -> None:
    texts = ["the fox", "the dog"]
    plain = await openai.embeddings.create(model=BASE, input=texts, encoding_format="float")
    packed = await openai.embeddings.create(model=BASE, input=texts)  # the client asks for base64 by itself
    expected = [vector_of(request) for request in house.engine.requests[:2]]
    assert [item.embedding for item in plain.data] == expected
    assert [item.embedding for item in packed.data] == expected
    assert [item.index for item in plain.data] == [0, 1]
    assert (plain.object, plain.data[0].object, plain.model) == ("list", "embedding", BASE)


async def test_base64_is_little_endian_float32(http: aiohttp.ClientSession, house: Any) -> None:
    house.engine.script = lambda request: MockReply(pooled=[1.0, -0.5, 0.0, 2.0])
    async with http.post(PATH, json={"input": "x", "encoding_format": "base64"}) as answer:
        embedding = (await answer.json())["data"][0]["embedding"]
    assert struct.unpack("<4f", base64.b64decode(embedding)) == (1.0, -0.5, 0.0, 2.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("the fox", ["the fox"]),
        (["the fox", "dog"], ["the fox", "dog"]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
async def test_every_form_of_input_is_read(
    http: aiohttp.ClientSession, house: Any, encoded: Any, given: Any, expected: list[Any]
) -> None:
    async with http.post(PATH, json={"input": given}) as answer:
        body = await answer.json()
    prompts = [request.prompt_token_ids for request in house.engine.requests]
    assert prompts == [encoded(item) if isinstance(item, str) else item for item in expected]
    total = sum(map(len, prompts))
    assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert len({request.answer_id for request in house.engine.requests}) == 1
    assert all(request.pooling is not None for request in house.engine.requests)


async def test_special_tokens_can_be_left_out(http: aiohttp.ClientSession, house: Any, encoded: Any) -> None:
    async with http.post(PATH, json={"input": "fox", "add_special_tokens": False}) as answer:
        assert answer.status == 200
    assert house.engine.requests[0].prompt_token_ids == encoded("fox")[1:-1]


@pytest.mark.many(6)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["fox", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [5, "fox"]}, "input"),
        ({"input": {"text": "fox"}}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 5}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "embed_dtype": "fp8_e4m3"}, "embed_dtype"),
        ({"input": "x", "endianness": "middle"}, "endianness"),
        ({"input": "x", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "x", "padding": "max_length"}, "padding"),
        ({"input": "x", "normalize": False}, "normalize"),
        ({"input": "x", "use_activation": "no"}, "use_activation"),
        ({"input": "x", "cache_salt": ""}, "cache_salt"),
        ({"input": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"input": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"}, "chat_template"),
        ({"input": "x" * 30, "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
async def test_bad_input_is_400_and_reaches_no_engine(
    http: aiohttp.ClientSession, house: Any, body: dict[str, Any], param: str
) -> None:
    async with http.post(PATH, json=body) as answer:
        assert answer.status == 400, await answer.text()
        assert (await answer.json())["error"]["param"] == param
    assert house.engine.requests == []


@pytest.mark.parametrize("given", ["fox " * 40, [[5] * 65], "fox" * 20_000])
async def test_input_that_is_too_long_is_400_unless_it_may_be_cut(
    http: aiohttp.ClientSession, house: Any, given: Any
) -> None:
    async with http.post(PATH, json={"input": given}) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    async with http.post(PATH, json={"input": given, "truncate_prompt_tokens": -1}) as answer:
        assert answer.status == 200, await answer.text()
    assert len(house.engine.requests[0].prompt_token_ids) == (64 if len(given) < 200 else 3)


async def test_cut_text_keeps_its_last_special_token(http: aiohttp.ClientSession, house: Any, encoded: Any) -> None:
    async with http.post(PATH, json={"input": "fox " * 40, "truncate_prompt_tokens": 7}) as answer:
        assert answer.status == 200
    whole = encoded("fox " * 40)
    assert house.engine.requests[0].prompt_token_ids == (*whole[:6], whole[-1])


async def test_dimensions_cut_and_renormalise(openai: AsyncOpenAI, house: Any) -> None:
    house.engine.script = lambda request: MockReply(pooled=[0.3, 0.4, 0.5, 0.70710678])
    short = await openai.embeddings.create(model=BASE, input="x", dimensions=2)
    assert short.data[0].embedding == pytest.approx([0.6, 0.8], abs=1e-6)
    whole = await openai.embeddings.create(model=BASE, input="x", dimensions=4)
    assert whole.data[0].embedding == pytest.approx([0.3, 0.4, 0.5, 0.70710678], abs=1e-7)


async def test_dimensions_of_a_vector_without_activation_are_cut_alone(http: aiohttp.ClientSession, house: Any) -> None:
    house.engine.script = lambda request: MockReply(pooled=[3.0, 4.0, 5.0, 6.0])
    for given, expected in (
        ({"use_activation": False}, [3.0, 4.0]),
        ({"use_activation": True}, [0.6, 0.8]),
        ({}, None),
    ):
        async with http.post(PATH, json={"input": "x", "dimensions": 2, **given}) as answer:
            found = (await answer.json())["data"][0]["embedding"]
        assert found == pytest.approx(expected or [0.6, 0.8])
        assert house.engine.requests[-1].pooling.is_unit is given.get("use_activation")


@pytest.mark.parametrize("endianness", ["native", "big", "little"])
@pytest.mark.parametrize("embed_dtype", ["float32", "float16", "bfloat16"])
async def test_base64_has_the_dtype_and_the_order_of_bytes_that_were_asked_for(
    http: aiohttp.ClientSession, house: Any, embed_dtype: str, endianness: str
) -> None:
    values = torch.cat(
        [torch.randn(2000), torch.tensor([0.0, -0.0, 1e-8, 65519.9, 65520.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8])]
    )
    house.engine.script = lambda request: MockReply(pooled=values.tolist())
    asked = {"input": "x", "encoding_format": "base64", "embed_dtype": embed_dtype, "endianness": endianness}
    async with http.post(PATH, json=asked) as answer:
        raw = base64.b64decode((await answer.json())["data"][0]["embedding"])
    expected = values.to(getattr(torch, embed_dtype))
    bits = expected.view(torch.int32 if embed_dtype == "float32" else torch.int16).numpy()
    kind = np.dtype(bits.dtype).newbyteorder({"native": "=", "big": ">", "little": "<"}[endianness])
    assert np.array_equal(np.frombuffer(raw, kind), bits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given", ["the fox jumps over dogs", list(range(5, 30))])
async def test_side_that_loses_tokens_is_the_callers(
    http: aiohttp.ClientSession, house: Any, text_model: TextModel, side: str, given: Any
) -> None:
    asked = {"input": given, "truncate_prompt_tokens": 6, "truncation_side": side}
    async with http.post(PATH, json=asked) as answer:
        assert answer.status == 200, await answer.text()
    oracle = bert_tokenizer()
    oracle.truncation_side = side
    cut = given[-6:] if side == "left" else given[:6]
    expected = oracle(given, truncation=True, max_length=6)["input_ids"] if isinstance(given, str) else cut
    assert list(house.engine.requests[0].prompt_token_ids) == expected


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "the fox [SEP]"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}],
]


@pytest.mark.parametrize(
    ("given", "chats"),
    [
        ({"messages": CHATS[0]}, CHATS[:1]),
        ({"messages": CHATS}, CHATS),
        ({"input": CHATS[1]}, CHATS[1:]),
        ({"input": CHATS}, CHATS),
        ({"messages": CHATS[0], "add_generation_prompt": True, "add_special_tokens": True}, CHATS[:1]),
        ({"messages": CHATS[0], "chat_template_kwargs": {"tone": "dog"}}, CHATS[:1]),
    ],
)
async def test_chats_are_rendered_by_the_models_template(
    http: aiohttp.ClientSession, house: Any, text_model: TextModel, given: dict[str, Any], chats: Any
) -> None:
    async with http.post(PATH, json={"model": BASE, **given}) as answer:
        assert answer.status == 200, await answer.text()
        assert len((await answer.json())["data"]) == len(chats)
    tone, prompt = given.get("chat_template_kwargs", {}).get("tone", ""), given.get("add_generation_prompt", False)
    for request, chat in zip(house.engine.requests, chats, strict=True):
        plain = [{**m, "content": m["content"] if isinstance(m["content"], str) else "a"} for m in chat]
        text = text_model.wrapper.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt, tone=tone)
        expected = text_model.wrapper(text, add_special_tokens=given.get("add_special_tokens", False))["input_ids"]
        written = request.prompt_token_ids.count(text_model.token_id("[SEP]"))
        if chat is CHATS[0]:  # what the caller writes is no control token
            assert written == 1 + given.get("add_special_tokens", False)
        else:
            assert list(request.prompt_token_ids) == expected


async def test_chats_are_cut_like_texts(http: aiohttp.ClientSession, house: Any) -> None:
    long = {"messages": [{"role": "user", "content": "fox " * 100}]}
    async with http.post(PATH, json=long) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    async with http.post(PATH, json={**long, "truncate_prompt_tokens": -1}) as answer:
        assert answer.status == 200, await answer.text()
    assert len(house.engine.requests[0].prompt_token_ids) == 64


async def test_adapter_is_in_headers_and_in_every_request(http: aiohttp.ClientSession, house: Any) -> None:
    ref = await house.register("acme/bot")
    asks = [{"model": "acme/bot"}, {"adapter_id": "acme/bot"}, {"adapters": [{"id": "acme/bot"}]}]
    for ask in asks:
        async with http.post(PATH, json={"input": ["a", "b"], **ask}) as answer:
            assert (await answer.json())["model"] == "acme/bot"
            assert answer.headers["X-Adapter-Digest"] == ref.digest
            assert answer.headers["X-Adapter-Version"] == "1"
            assert answer.headers["X-Request-Id"]
            assert answer.headers["Server-Timing"].startswith("queue;dur=1.00, load;dur=2.00, prefill;dur=3.00")
    async with http.post(PATH, json={"input": "a"}, headers={"X-Adapter-Id": "acme/bot"}) as answer:
        assert answer.headers["X-Adapter-Id"] == "acme/bot"
    assert all(request.refs == (ref,) for request in house.engine.requests)
    assert len(house.engine.requests) == 7


async def test_composition_scales_and_urgency_reach_the_engine(http: aiohttp.ClientSession, house: Any) -> None:
    one, two = await house.register("acme/a", seed=1), await house.register("acme/b", seed=2)
    adapters = [{"id": "acme/a", "scale": 0.5}, {"id": "acme/b", "scale": 2.0}]
    extra = {"priority": -3, "timeout_ms": 500, "on_cold": "fail", "max_cold_wait_ms": 7}
    async with http.post(PATH, json={"input": "a", "adapters": adapters, **extra}) as answer:
        assert answer.status == 200
        assert answer.headers["X-Adapter-Scale"] == "0.5,2.0"
    (request,) = house.engine.requests
    assert {use.ref.digest: use.scale for use in request.adapters} == {one.digest: 0.5, two.digest: 2.0}
    assert (request.priority, request.on_cold, request.max_cold_wait) == (-3, OnCold.FAIL, 0.007)
    assert request.deadline == pytest.approx(request.arrival_time + 0.5)


async def test_unknown_adapter_is_404(http: aiohttp.ClientSession) -> None:
    async with http.post(PATH, json={"input": "a", "model": "nobody"}) as answer:
        assert answer.status == 404


async def test_error_of_one_input_fails_the_answer_and_aborts_the_others(
    http: aiohttp.ClientSession, house: Any
) -> None:
    gate = asyncio.Event()

    def script(request: InferenceRequest) -> MockReply:
        bad = request.request_id.endswith("-3")
        return MockReply(error=InternalError("x")) if bad else MockReply(gate=gate)

    house.engine.script = script
    async with http.post(PATH, json={"input": ["a"] * 6}) as answer:
        assert answer.status == 500
        assert "data" not in await answer.json()
    assert len(house.engine.aborted) == 5
    assert (await house.engine.stats()).num_running == 0


async def test_leaving_early_aborts_all_inputs(http: aiohttp.ClientSession, house: Any) -> None:
    everyone_waits = asyncio.Event()

    def script(request: InferenceRequest) -> MockReply:
        if len(house.engine.requests) == 8:
            everyone_waits.set()
        return MockReply(gate=asyncio.Event())

    house.engine.script = script
    task = asyncio.create_task(http.post(PATH, json={"input": ["a"] * 8}).__aenter__())
    await everyone_waits.wait()
    task.cancel()
    async with asyncio.timeout(60):
        while len(house.engine.aborted) < 8:
            await asyncio.sleep(0.01)


async def test_more_inputs_than_the_queue_takes_go_in_turns_and_keep_their_order(
    openai: AsyncOpenAI, house: Any
) -> None:
    house.engine.gate = QueueGate(QueueLimits(max_queue=MAX_IN_FLIGHT))
    given = [[5 + index % 7, 5 + index % 11, 5 + index % 13] for index in range(2048)]
    answer = await openai.embeddings.create(model=BASE, input=given)
    by_prompt = {request.prompt_token_ids: vector_of(request) for request in house.engine.requests}
    assert [item.embedding for item in answer.data] == [by_prompt[tuple(ids)] for ids in given]


async def test_inputs_of_one_answer_are_not_mixed_after_a_fallback(http: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/bot")
    house.engine.script = lambda request: MockReply(fell_back=request.fallback is not None)
    given = [[5, 6]] * (MAX_IN_FLIGHT + 50)
    async with http.post(PATH, json={"input": given, "model": "acme/bot", "on_cold": "base"}) as answer:
        body = await answer.json()
        assert answer.headers["X-Adapter-Fallback"] == "base"
    assert body["model"] == BASE
    assert len({tuple(item["embedding"]) for item in body["data"]}) == 1
    late = house.engine.requests[MAX_IN_FLIGHT:]
    assert all((request.adapters, request.fallback, request.on_cold) == ((), None, OnCold.WAIT) for request in late)


async def test_late_inputs_wait_for_the_adapter_that_answered_the_first(
    http: aiohttp.ClientSession, house: Any
) -> None:
    ref = await house.register("acme/bot")
    given = [[5, 6]] * (MAX_IN_FLIGHT + 50)
    body = {"input": given, "model": "acme/bot", "on_cold": "base", "max_cold_wait_ms": 5}
    async with http.post(PATH, json=body) as answer:
        assert answer.headers["X-Adapter-Digest"] == ref.digest
    late = house.engine.requests[MAX_IN_FLIGHT:]
    assert all((request.refs, request.fallback, request.cold_timeout) == ((ref,), None, None) for request in late)


async def test_adapter_that_cannot_be_had_is_503_with_retry_after(http: aiohttp.ClientSession, house: Any) -> None:
    house.engine.script = lambda request: MockReply(error=AdapterUnavailableError("x", retry_after=3))
    async with http.post(PATH, json={"input": ["a", "b"]}) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "3")


async def test_tokens_and_times_are_counted(http: aiohttp.ClientSession, encoded: Any) -> None:
    async with http.post(PATH, json={"input": ["the fox", "a"]}) as answer:
        assert answer.status == 200
    text = await (await http.get("/metrics")).text()
    total = float(len(encoded("the fox")) + len(encoded("a")))
    assert f'vllm:prompt_tokens_total{{engine="0",model_name="{BASE}"}} {total}' in text
    assert f'vllm:time_to_first_token_seconds_count{{engine="0",model_name="{BASE}"}} 2.0' in text
    assert f'vllm:generation_tokens_total{{engine="0",model_name="{BASE}"}} 0.0' in text
    assert f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{BASE}"}} 2.0' in text


async def test_default_prompt_stands_before_texts_and_not_before_token_ids(
    http: aiohttp.ClientSession, house: Any, encoded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_serve.text.tokenizer import TextPreparation

    monkeypatch.setattr(house.services.text, "preparation", TextPreparation("query "))
    for given in ("fox", [5, 6]):
        async with http.post(PATH, json={"input": given}) as answer:
            assert answer.status == 200
    assert [request.prompt_token_ids for request in house.engine.requests] == [encoded("query fox"), (5, 6)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/classify", "/v1/classify"])
async def test_other_tasks_are_refused_in_words(http: aiohttp.ClientSession, path: str) -> None:
    async with http.post(path, json={"prompt": "x", "input": "x"}) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["code"] == "wrong_task"
    assert "--task embed" in error["message"]


async def test_error_names_openais_client_a_bad_request(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="dimensions"):
        await openai.embeddings.create(model=BASE, input="x", dimensions=1000)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "guided_json", "guided_choice"])
async def test_a_vector_cannot_be_held_to_a_schema(http: aiohttp.ClientSession, field: str) -> None:
    async with http.post("/v1/embeddings", json={"input": "x", field: {"type": "json_object"}}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == field
