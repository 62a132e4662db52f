"""/tokenize, /detokenize, /tokenizer_info"""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from lora_serve.text.tokenizer import TextModel

HI = [{"role": "user", "content": "Hi"}]


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def test_prompt_goes_there_and_back(http: aiohttp.ClientSession, text_model: TextModel) -> None:
    status, found = await post(http, "/tokenize", model="tiny-base", prompt="Schöne Grüße 😀")
    assert status == 200
    assert found["tokens"] == text_model.wrapper("Schöne Grüße 😀")["input_ids"]
    assert (found["count"], found["max_model_len"], found["token_strs"]) == (len(found["tokens"]), 128, None)
    assert (await post(http, "/detokenize", tokens=found["tokens"]))[1] == {"prompt": "<s>Schöne Grüße 😀"}
    _, bare = await post(http, "/tokenize", prompt="Schöne Grüße 😀", add_special_tokens=False)
    assert bare["tokens"] == found["tokens"][1:]


async def test_token_strings_are_the_vocabularys(http: aiohttp.ClientSession, text_model: TextModel) -> None:
    _, found = await post(http, "/tokenize", prompt="The fox", return_token_strs=True)
    assert found["token_strs"] == text_model.wrapper.convert_ids_to_tokens(found["tokens"])


async def test_messages_are_what_chat_would_send(http: aiohttp.ClientSession, house: Any) -> None:
    _, found = await post(http, "/tokenize", messages=HI)
    await post(http, "/v1/chat/completions", messages=HI, max_tokens=1)
    assert tuple(found["tokens"]) == house.engine.requests[0].prompt_token_ids
    _, open_end = await post(http, "/tokenize", messages=HI, add_generation_prompt=False)
    assert open_end["tokens"] == found["tokens"][:-1]


@pytest.mark.many(5)
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": ["x"]}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [1, "x"]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [400]}, 400),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404),
    ],
)
async def test_wrong_input_is_refused(http: aiohttp.ClientSession, path: str, body: Any, status: int) -> None:
    assert (await post(http, path, **body))[0] == status


async def test_prompt_beyond_the_context_may_be_counted(http: aiohttp.ClientSession) -> None:
    """Counting is what /tokenize is for."""
    status, found = await post(http, "/tokenize", prompt="a b " * 200)
    assert (status, found["count"] > 128) == (200, True)


async def test_info_is_the_tokenizers(http: aiohttp.ClientSession, text_model: TextModel) -> None:
    async with http.get("/tokenizer_info") as answer:
        info = await answer.json()
    assert info["chat_template"] == text_model.wrapper.chat_template
    assert info["tokenizer_class"]
