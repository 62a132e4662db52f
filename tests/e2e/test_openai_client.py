"""The openai client against a real server process: right weights, streaming, cancelling, many users, bad neighbours."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from typing import Any

import aiohttp
import openai as openai_package
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, NAMES, Site
from tests.engine_choice import EngineHost
from tests.oracle import load_peft, logprobs_with_peft

MODELS = ("tiny", *NAMES)


@pytest.fixture(scope="module")
def oracle(site: Site) -> Any:
    return load_peft(site.model, site.adapters)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 250, (length,), generator=generator).tolist()


def token_ids(choice: Any) -> list[int]:
    return [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]


def check_with_peft(oracle: Any, model: str, ids: list[int], choice: Any) -> None:
    tokens = token_ids(choice)
    truth = logprobs_with_peft(oracle, None if model == "tiny" else model, ids + tokens)[len(ids) - 1 : -1]
    assert tokens == truth.argmax(-1).tolist()
    assert choice.logprobs.token_logprobs == pytest.approx(truth.max(-1).values.tolist(), abs=1e-3)


ASK: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 8,
    "logprobs": 1,
    "extra_body": {"return_tokens_as_token_ids": True, "ignore_eos": True},
}


def prefix_cache_counts(server: ServerProcess) -> tuple[float, float]:
    """Queries and hits, in tokens, as a scraper sees them."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    return values["vllm:prefix_cache_queries_total"], values["vllm:prefix_cache_hits_total"]


def prefix_cache_counts_at_rest(server: ServerProcess) -> tuple[float, float]:
    """Once a while has changed nothing: the replicas of a fleet report every second."""
    counts = prefix_cache_counts(server)
    while True:
        time.sleep(1.5)
        before, counts = counts, prefix_cache_counts(server)
        if counts == before:
            return counts


@pytest.mark.parametrize("model", ["tiny", "acme/a"])
def test_prompt_asked_again_is_found_and_answered_as_in_peft(
    openai: OpenAI, server: ServerProcess, oracle: Any, model: str
) -> None:
    ids = prompt(70, 77)  # 64 tokens and more: a fleet sends such a prompt to where it was
    queries, hits = prefix_cache_counts_at_rest(server)
    for expected in (0, 64):
        answer = openai.completions.create(model=model, prompt=ids, **ASK)
        check_with_peft(oracle, model, ids, answer.choices[0])
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected
    assert prefix_cache_counts_at_rest(server) == (queries + 140, hits + 64)


@pytest.mark.parametrize("model", MODELS)
def test_each_model_answers_as_in_peft(openai: OpenAI, oracle: Any, model: str) -> None:
    ids = prompt(20, 1)
    answer = openai.completions.create(model=model, prompt=ids, **ASK)
    assert answer.model == model
    check_with_peft(oracle, model, ids, answer.choices[0])


def test_headers_name_the_adapter_that_answered(openai: OpenAI) -> None:
    raw = openai.completions.with_raw_response.create(model="acme/a@1", prompt=[5, 6], max_tokens=1)
    assert raw.headers["x-adapter-id"] == "acme/a"
    assert raw.headers["x-adapter-version"] == "1"
    assert raw.headers["x-adapter-digest"].startswith("sha256:")
    assert "prefill;dur=" in raw.headers["server-timing"]
    other = openai.completions.with_raw_response.create(model="acme/b", prompt=[5, 6], max_tokens=1)
    assert other.headers["x-adapter-digest"] != raw.headers["x-adapter-digest"]


@pytest.mark.parametrize("model", ["tiny", "globex/d"])
def test_streaming_gives_the_same_text_as_not_streaming(openai: OpenAI, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    whole = openai.chat.completions.create(**ask, max_tokens=12, extra_body={"ignore_eos": True})
    stream = openai.chat.completions.create(**ask, max_tokens=12, stream=True, extra_body={"ignore_eos": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


async def test_sixty_four_users_get_their_own_adapters_answers(
    server: ServerProcess, engine_host: EngineHost, oracle: Any
) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        asks = [(MODELS[user % len(MODELS)], prompt(3 + user % 30, user)) for user in range(64)]
        answers = await asyncio.gather(
            *(client.completions.create(model=model, prompt=ids, **ASK) for model, ids in asks)
        )
    for (model, ids), answer in zip(asks, answers, strict=True):
        check_with_peft(oracle, model, ids, answer.choices[0])
    async with aiohttp.ClientSession(server.url, headers=ADMIN) as session:
        engine = await (await session.get("/admin/engine")).json()
    assert max(batch["num_adapters"] for batch in engine["recent_batches"]) >= len(NAMES) / engine_host.num_engines


async def test_cancelled_stream_frees_its_row_within_a_second(server: ServerProcess) -> None:
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        aiohttp.ClientSession(server.url, headers=ADMIN) as session,
    ):
        stream = await client.completions.create(
            model="acme/a", prompt=[5], max_tokens=90, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
        deadline = time.monotonic() + 1.0
        while True:
            engine = await (await session.get("/admin/engine")).json()
            if engine["num_running"] == 0:
                break
            assert time.monotonic() < deadline, "the row ran on without its client"
            await asyncio.sleep(0.01)
    assert engine["num_free_blocks"] == engine["num_blocks"]


def test_seeded_answer_is_the_same_in_company(openai: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "acme/b", "prompt": prompt(9, 3), "seed": 11, "temperature": 1.5, "max_tokens": 10}
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    alone = openai.completions.create(**ask, logprobs=0, extra_body=extra)
    several = openai.completions.create(
        **{**ask, "prompt": [prompt(30, 8), ask["prompt"], prompt(2, 9)]}, logprobs=0, extra_body=extra
    )
    assert token_ids(several.choices[1]) == token_ids(alone.choices[0])
    assert token_ids(several.choices[0]) != token_ids(alone.choices[0])


def test_lm_eval_gets_prompt_plus_one_logprobs(openai: OpenAI, oracle: Any) -> None:
    ids = prompt(12, 4)
    answer = openai.completions.create(model="globex/c", prompt=ids, echo=True, max_tokens=1, logprobs=1, temperature=0)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert len(found.token_logprobs) == len(ids) + 1
    assert found.token_logprobs[0] is None
    truth = logprobs_with_peft(oracle, "globex/c", ids)
    wanted = [truth[i, token].item() for i, token in enumerate(ids[1:])]
    assert found.token_logprobs[1:-1] == pytest.approx(wanted, abs=1e-3)


def test_bad_requests_are_refused_in_words_while_a_neighbour_answers(openai: OpenAI, oracle: Any) -> None:
    ids = prompt(20, 5)
    with pytest.raises(openai_package.NotFoundError, match="does not exist or you do not have access"):
        openai.completions.create(model="acme/none", prompt=ids)
    with pytest.raises(openai_package.BadRequestError, match="96"):
        openai.completions.create(model="acme/a", prompt=prompt(200, 1))
    with pytest.raises(openai_package.BadRequestError):
        openai.completions.create(model="acme/a", prompt=[10_000_000])
    with pytest.raises(openai_package.BadRequestError, match="logit_bias"):
        openai.completions.create(model="acme/a", prompt=ids, logit_bias={"99999999": 1})
    check_with_peft(oracle, "acme/a", ids, openai.completions.create(model="acme/a", prompt=ids, **ASK).choices[0])


def test_body_of_a_hundred_megabytes_is_refused_and_the_server_stays_up(server: ServerProcess, openai: OpenAI) -> None:
    request = urllib.request.Request(
        f"{server.url}/v1/completions", data=b'{"prompt": "' + b"x" * 100_000_000 + b'"}', method="POST",
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    with pytest.raises((urllib.error.URLError, ConnectionError)) as refused:
        urllib.request.urlopen(request, timeout=120)
    if isinstance(refused.value, urllib.error.HTTPError):  # else the server hung up before the body was sent
        with refused.value:
            assert refused.value.code == 413
    assert openai.completions.create(model="tiny", prompt=[5], max_tokens=1).usage is not None
