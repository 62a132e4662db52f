"""The order and number of alternatives, as vLLM has them; -1 for the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.core.config import ServerConfig
from lora_serve.core.messages import TokenLogprobs
from lora_serve.server.inference import requests
from lora_serve.server.schemas.generated import TokenSpeller, chat_logprobs, completion_logprobs, prompt_logprobs
from lora_serve.text.tokenizer import TextModel

UNLIKELY = TokenLogprobs(7, -3.0, 4, ((10, -0.1), (11, -0.2), (12, -0.3)))
SECOND = TokenLogprobs(11, -0.2, 2, ((10, -0.1), (11, -0.2), (12, -0.3)))
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("entry", "count", "shown"),
    [
        (UNLIKELY, 2, [7, 10]),
        (UNLIKELY, 0, []),
        (UNLIKELY, -1, [7, 10, 11, 12]),
        (SECOND, 2, [11, 10]),
        (SECOND, 3, [11, 10, 12]),
    ],
)
def test_token_that_came_is_the_first_of_a_chats(
    text_model: TextModel, entry: TokenLogprobs, count: int, shown: list[int]
) -> None:
    made: Any = chat_logprobs(TokenSpeller(text_model, as_ids=True), [entry], count)
    (found,) = made.content
    assert [top.token for top in found.top_logprobs] == [f"token_id:{token_id}" for token_id in shown]


def test_token_that_came_is_the_first_of_a_completions_and_of_a_prompts(text_model: TextModel) -> None:
    speller = TokenSpeller(text_model, as_ids=True)
    made: Any = completion_logprobs(speller, [7, 11], [UNLIKELY, SECOND], 2, 0)
    assert [list(top) for top in made.top_logprobs] == [
        ["token_id:7", "token_id:10", "token_id:11"],
        ["token_id:11", "token_id:10"],
    ]
    (found,) = prompt_logprobs(text_model, [UNLIKELY])
    assert [(name, part.rank) for name, part in found.items()] == [("7", 4), ("10", 1), ("11", 2), ("12", 3)]


class TestAllOfThem:
    @pytest.fixture
    def server_config(self, server_config: ServerConfig) -> ServerConfig:
        return replace(server_config, max_logprobs=-1)

    async def test_whole_vocabulary_is_shown(self, http: aiohttp.ClientSession, house: Any) -> None:
        body = {**CHAT, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1}
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            made = await answer.json()
        (request,) = house.engine.requests
        size = house.services.spec.vocab_size
        assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (size, size)
        assert [len(entry["top_logprobs"]) for entry in made["choices"][0]["logprobs"]["content"]] == [size] * 2

    async def test_answer_of_more_numbers_than_memory_has_room_for_is_refused(
        self, http: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = house.services.spec.vocab_size
        monkeypatch.setattr(requests, "MANY_LOGPROBS", size - 1)
        monkeypatch.setattr(requests, "MAX_LOGPROB_VALUES", 8 * size)
        body = {"prompt": [[5] * 3] * 2, "max_tokens": 1, "prompt_logprobs": -1}
        async with http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        async with http.post("/v1/completions", json=body | {"prompt": [[5] * 3] * 3}) as answer:
            text = await answer.text()
        assert (answer.status, f"would hold {9 * size} log-probabilities" in text) == (400, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": -1}),
        ("/v1/chat/completions", {**CHAT, "prompt_logprobs": -1}),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": -1}),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": -1, "echo": True, "logprobs": 1}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": -1}}),
    ],
)
async def test_whole_vocabulary_is_refused_where_it_is_more_than_the_limit(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    async with http.post(path, json=body) as answer:
        text = await answer.text()
    assert (answer.status, "--max-logprobs" in text) == (400, True)


async def test_generated_ids_have_their_own_logprob_and_no_bytes(http: aiohttp.ClientSession) -> None:
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 2, "logprobs": 0}}
    async with http.post("/inference/v1/generate", json=body) as answer:
        (choice,) = (await answer.json())["choices"]
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        own = {"token": f"token_id:{token_id}", "logprob": entry["logprob"], "bytes": None}
        assert entry == {**own, "top_logprobs": [own]}
