"""A real server on a tiny BERT: vectors over HTTP are transformers' and PEFT's own."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Iterator, Sequence

import aiohttp
import numpy as np
import pytest
from openai import OpenAI

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN
from tests.e2e.plain_http import call
from tests.e2e.pooling_place import MAX_LENGTH, NAMES, TEXTS, TOLERANCE, Place, serving
from tests.engine_choice import EngineHost
from tests.pooling_models import load_base


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("embed"), "embed")


@pytest.fixture(scope="module")
def server(engine_host: EngineHost, place: Place) -> Iterator[ServerProcess]:
    yield from serving(engine_host, place)


@pytest.fixture
def openai(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("name", ["tiny", *NAMES])
def test_openais_client_gets_the_vectors_of_each_adapter(openai: OpenAI, place: Place, name: str) -> None:
    plain = openai.embeddings.create(model=name, input=TEXTS, encoding_format="float")
    packed = openai.embeddings.create(model=name, input=TEXTS)
    for item, other, text in zip(plain.data, packed.data, TEXTS, strict=True):
        np.testing.assert_allclose(item.embedding, other.embedding, atol=1e-5)  # two runs, in other batches perhaps
        expected = place.plain(None if name == "tiny" else name, text).numpy()
        np.testing.assert_allclose(item.embedding, expected, atol=TOLERANCE)


async def test_mixed_adapters_at_once_each_get_their_own(server: ServerProcess, place: Place) -> None:
    generator = random.Random(3)
    names: list[str | None] = [None, *NAMES]
    asks = [(generator.choice(names), generator.sample(TEXTS, generator.randint(1, 5))) for _ in range(40)]
    async with aiohttp.ClientSession(server.url) as session:

        async def ask(name: str | None, texts: Sequence[str]) -> list[list[float]]:
            async with session.post("/v1/embeddings", json={"model": name or "tiny", "input": texts}) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.headers["X-Adapter-Id"] == (name or "tiny")
                return [item["embedding"] for item in (await answer.json())["data"]]

        answers = await asyncio.gather(*(ask(name, texts) for name, texts in asks))
        engine = await (await session.get("/admin/engine", headers=ADMIN)).json()
    for (name, texts), vectors in zip(asks, answers, strict=True):
        for text, vector in zip(texts, vectors, strict=True):
            np.testing.assert_allclose(vector, place.plain(name, text).numpy(), atol=TOLERANCE)
    assert max(batch["num_adapters"] for batch in engine["recent_batches"]) > 1


def test_shortened_vectors_have_unit_length_again(openai: OpenAI, place: Place) -> None:
    short = openai.embeddings.create(model="tiny", input="the fox", dimensions=8).data[0].embedding
    head = place.plain(None, "the fox")[:8]
    np.testing.assert_allclose(short, (head / head.norm()).numpy(), atol=TOLERANCE)


def test_vector_without_activation_is_the_plain_mean(server: ServerProcess, place: Place) -> None:
    body = {"input": "the fox", "use_activation": False, "encoding_format": "base64", "embed_dtype": "float16"}
    (item,) = call(f"{server.url}/v1/embeddings", body).json["data"]
    hidden = load_base(place.model, "embed")(**place.tokenizer("the fox", return_tensors="pt")).last_hidden_state[0]
    mean = hidden.mean(0).detach().numpy()
    assert abs(np.linalg.norm(mean) - 1) > 0.1
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(item["embedding"]), "<f2"), mean, atol=1e-3)


def test_long_texts_are_refused_or_cut(server: ServerProcess, place: Place) -> None:
    text = "the quick brown fox jumps " * 20
    url = f"{server.url}/v1/embeddings"
    refused = call(url, {"input": text})
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
    found = call(url, {"input": text, "truncate_prompt_tokens": -1}).json
    cut = place.tokenizer(text, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    same = call(url, {"input": cut}).json
    np.testing.assert_allclose(found["data"][0]["embedding"], same["data"][0]["embedding"], atol=1e-5)
    assert found["usage"] == same["usage"] == {"prompt_tokens": MAX_LENGTH, "total_tokens": MAX_LENGTH}


def test_score_is_the_cosine(server: ServerProcess, place: Place) -> None:
    body = {"model": NAMES[1], "text_1": TEXTS[0], "text_2": TEXTS[1:4]}
    found = [item["score"] for item in call(f"{server.url}/score", body).json["data"]]
    left, *others = (place.plain(NAMES[1], text) for text in TEXTS[:4])
    np.testing.assert_allclose(found, [float(left @ other) for other in others], atol=TOLERANCE)


def test_completions_are_refused_in_words_and_the_rest_of_the_api_is_there(server: ServerProcess) -> None:
    refused = call(f"{server.url}/v1/completions", {"prompt": "x"})
    assert refused.status == 400
    assert "--task embed" in refused.json["error"]["message"]
    models = call(f"{server.url}/v1/models").json["data"]
    assert [model["id"] for model in models] == ["tiny", *NAMES]
    assert "vllm:kv_cache_usage_perc" in call(f"{server.url}/metrics").text
    assert call(f"{server.url}/tokenize", {"prompt": "the fox"}).json["count"] > 2
