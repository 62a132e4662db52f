"""Whatever a caller sends: a 4xx in OpenAI's form that says what is wrong, and the server stays up."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.json_body import check_fields, parse_json
from lora_serve.server.schemas.inference import ChatFields, CompletionFields

JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]
VOCAB = 400

RAW = {
    "empty": b"",
    "not_json": b"{max_tokens: 5}",
    "cut_short": b'{"prompt": "x"',
    "not_an_object": b"[1, 2]",
    "a_number": b"5",
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "too_large_a_float": b'{"prompt": "x", "temperature": 1e999}',
    "digits_without_end": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "deep_lists": b'{"prompt": ' + b"[" * 40_000,
    "deep_objects": b'{"a":' * 15_000,
    "latin_1": '{"prompt": "Köln"}'.encode("latin-1"),
    "utf_16": '{"prompt": "x"}'.encode("utf-16"),
    "half_a_surrogate_pair": b'{"prompt": "\\ud83d"}',
    "surrogate_in_a_name": b'{"prompt": "x", "\\uDC00": 1}',
    "zero_byte": b'{"prompt": "x"}\x00',
}


async def test_body_that_is_no_sound_json_is_400(http: aiohttp.ClientSession) -> None:
    for name, raw in RAW.items():
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            async with http.post(path, data=raw, headers=JSON) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["type"]) == (400, "invalid_request_error"), (name, path, error)
            assert 10 < len(error["message"]) < 400
            assert "sys." not in error["message"]  # Python's words to programmers
            assert answer.headers["X-Request-Id"]


COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["x"] * 65}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": [1] * 128}, "prompt"),
    ({"prompt": [1] * 120}, "max_tokens"),
    ({"prompt": "word " * 12_000}, "prompt"),
    ({"max_tokens": "5x"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 128}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": "two"}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e30}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "much"}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(301)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"model": 5}, "model"),
    ({"model": "x" * 600}, "model"),
    ({"adapter_id": 5}, "adapter_id"),
    ({"adapters": "acme/a"}, "adapters"),
    ({"adapters": [{"scale": 1}]}, "adapters[0].id"),
    ({"adapters": [{"id": "a", "scale": "big"}]}, "adapters[0].scale"),
    ({"priority": 2**40}, "priority"),
    ({"timeout_ms": 0}, "timeout_ms"),
    ({"max_cold_wait_ms": -1}, "max_cold_wait_ms"),
    ({"on_cold": "panic"}, "on_cold"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_json": {"type": "objects"}}, "guided_json"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]


async def test_wrong_field_is_400_and_named(http: aiohttp.ClientSession, house: Any) -> None:
    for change, param in COMPLETION:
        async with http.post("/v1/completions", json={"prompt": "x", **change}) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param), (change, error)
    assert house.engine.requests == []


@pytest.mark.many(5)
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 128}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x " * 200}]}, "messages"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"functions": [{}]}, "functions"),
    ],
)
async def test_wrong_chat_field_is_400_and_named(
    http: aiohttp.ClientSession, change: dict[str, Any], param: str | None
) -> None:
    async with http.post("/v1/chat/completions", json={"messages": HI, **change}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, param), error


async def test_too_long_a_prompt_tells_both_numbers(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"maximum context length is 128 tokens.* 150 tokens.*\(110 in.*40 in"):
        await openai.completions.create(model="tiny-base", prompt=[1] * 110, max_tokens=40)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_body_of_another_type_is_415(http: aiohttp.ClientSession, kind: str) -> None:
    async with http.post("/v1/completions", data=b'{"prompt": "x"}', headers={"Content-Type": kind}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.api+json"])
async def test_json_by_any_name_is_taken(http: aiohttp.ClientSession, kind: str) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    async with http.post("/v1/completions", data=body, headers={"Content-Type": kind}) as answer:
        assert answer.status == 200


async def test_body_over_the_limit_is_413(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", data=b"x" * 100_001, headers=JSON) as answer:
        assert answer.status == 413
        assert "100000" in (await answer.json())["error"]["message"]
        assert answer.headers["X-Request-Id"]


async def test_body_over_the_limit_without_a_length_is_413(http: aiohttp.ClientSession) -> None:
    async def chunks() -> Any:
        for _ in range(30):
            yield b"x" * 10_000

    async with http.post("/v1/completions", data=chunks(), headers=JSON) as answer:
        assert answer.status == 413


async def test_compressed_body_is_read_and_a_bomb_is_413(http: aiohttp.ClientSession) -> None:
    headers = {**JSON, "Content-Encoding": "gzip"}
    good = gzip.compress(b'{"prompt": "x", "max_tokens": 1}')
    async with http.post("/v1/completions", data=good, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    async with http.post("/v1/completions", data=gzip.compress(b" " * 10**7), headers=headers) as answer:
        assert answer.status == 413
    async with http.post("/v1/completions", data=b"not gzip at all", headers=headers) as answer:
        assert answer.status == 400


async def test_compressed_body_that_decodes_to_little_is_counted_as_it_is_sent(http: aiohttp.ClientSession) -> None:
    async def chunks() -> Any:
        for _ in range(30):
            yield gzip.compress(b"") * 500
        yield gzip.compress(b'{"prompt": "x", "max_tokens": 1}')

    headers = {**JSON, "Content-Encoding": "gzip"}
    async with http.post("/v1/completions", data=chunks(), headers=headers) as answer:
        assert answer.status == 413


async def test_unknown_encoding_is_415(http: aiohttp.ClientSession) -> None:
    headers = {**JSON, "Content-Encoding": "lzw"}
    async with http.post("/v1/completions", data=b"{}", headers=headers) as answer:
        assert answer.status == 415


async def test_embeddings_of_a_generating_model_are_refused_in_words(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="--task embed"):
        await openai.embeddings.create(model="tiny-base", input="x")


async def test_server_answers_as_before_after_all_of_it(http: aiohttp.ClientSession) -> None:
    for raw in RAW.values():
        async with http.post("/v1/completions", data=raw, headers=JSON):
            pass
    async with http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}) as answer:
        assert answer.status == 200


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
NAMES = st.sampled_from([*CompletionFields.model_fields, *ChatFields.model_fields, "tools"])


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_give_a_value_or_a_400(raw: bytes) -> None:
    with suppress(InvalidRequestError):
        json.dumps(parse_json(raw), ensure_ascii=False).encode()


@given(st.dictionaries(NAMES, JSON_VALUES, max_size=6))
def test_any_values_of_any_fields_give_fields_or_a_400(body: dict[str, Any]) -> None:
    for model in (CompletionFields, ChatFields):
        with suppress(InvalidRequestError):
            check_fields(model, {"prompt": "x", "messages": [], **body})
