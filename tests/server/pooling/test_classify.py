"""POST /classify, with transformers' pipeline's arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import torch

from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.entry import VersionEntry
from lora_serve.core.model_spec import PoolingSpec
from lora_serve.text.tokenizer import TextModel
from tests.catalog_versions import digest
from tests.mock_engine import MockReply
from tests.server.conftest import BASE
from tests.server.pooling.conftest import CLASSIFY

LOGITS = [0.5, -1.0, 2.0, 0.0]


@pytest.fixture
def pooling() -> PoolingSpec:
    return CLASSIFY


def register_head(house: Any, name: str, letter: str, num_labels: int, metadata: dict[str, Any] | None) -> None:
    """An adapter version with a head of its own."""
    summary = {"traits": {"is_additive": False, "num_labels": num_labels}}
    Registration(id=name, metadata=metadata).commit(
        house.services.catalog.ledger, VersionEntry(0, digest(letter), 8, 10, summary, "x", 1.0)
    )


async def classify(http: aiohttp.ClientSession, path: str = "/classify", **body: Any) -> dict[str, Any]:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_answer_has_vllms_shape_and_softmax(http: aiohttp.ClientSession, house: Any, path: str) -> None:
    house.engine.script = lambda request: MockReply(pooled=LOGITS)
    body = await classify(http, path, input=["the fox", "a"], model=BASE)
    assert (body["object"], body["model"]) == ("list", BASE)
    assert body["id"].startswith("classify-")
    assert body["created"] > 1e9
    assert [item["index"] for item in body["data"]] == [0, 1]
    expected = torch.tensor(LOGITS).softmax(-1).tolist()
    for item in body["data"]:
        assert (item["label"], item["num_classes"]) == ("good", 4)
        assert item["probs"] == pytest.approx(expected, abs=1e-7)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0


async def test_without_activation_the_logits_are_shown(http: aiohttp.ClientSession, house: Any) -> None:
    house.engine.script = lambda request: MockReply(pooled=LOGITS)
    (item,) = (await classify(http, input="the fox", use_activation=False))["data"]
    assert (item["label"], item["probs"]) == ("good", LOGITS)
    (item,) = (await classify(http, input="the fox", use_activation=True))["data"]
    assert sum(item["probs"]) == pytest.approx(1)


async def test_chat_is_classified_as_one_input(http: aiohttp.ClientSession, house: Any, text_model: TextModel) -> None:
    assert len((await classify(http, messages=[{"role": "user", "content": "the fox"}]))["data"]) == 1
    expected = text_model.wrapper("user the fox[SEP]", add_special_tokens=False)["input_ids"]
    assert list(house.engine.requests[0].prompt_token_ids) == expected


async def test_token_ids_are_an_input(http: aiohttp.ClientSession, house: Any) -> None:
    assert len((await classify(http, input=[5, 6, 7]))["data"]) == 1
    assert house.engine.requests[0].prompt_token_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"labels": ["no", "yes"]}, "yes"),
        ({"labels": ["one", "two", "three"]}, "LABEL_1"),
        ({"labels": [1, 2]}, "LABEL_1"),
        (None, "LABEL_1"),
    ],
)
async def test_adapters_own_head_has_the_labels_of_its_registration(
    http: aiohttp.ClientSession, house: Any, metadata: dict[str, Any] | None, expected: str
) -> None:
    register_head(house, "acme/mood", "a", 2, metadata)
    house.engine.script = lambda request: MockReply(pooled=[0.0, 1.0])
    body = await classify(http, input="x", model="acme/mood")
    assert (body["model"], body["data"][0]["label"], body["data"][0]["num_classes"]) == ("acme/mood", expected, 2)


async def test_fallbacks_labels_are_those_of_who_answers(http: aiohttp.ClientSession, house: Any) -> None:
    register_head(house, "acme/mood", "a", 2, {"labels": ["no", "yes"]})
    house.engine.script = lambda request: MockReply(pooled=LOGITS, fell_back=True)
    body = await classify(http, input="x", model="acme/mood", on_cold="base")
    assert (body["model"], body["data"][0]["label"]) == (BASE, "good")


async def test_bad_input_is_400(http: aiohttp.ClientSession, house: Any) -> None:
    for given in ("", [], [""], None):
        async with http.post("/classify", json={"input": given}) as answer:
            assert answer.status == 400
    assert house.engine.requests == []


async def test_huge_logits_give_numbers(http: aiohttp.ClientSession, house: Any) -> None:
    house.engine.script = lambda request: MockReply(pooled=[1e30, -1e30, 0.0, 1e30])
    assert (await classify(http, input="x"))["data"][0]["probs"] == [0.5, 0.0, 0.0, 0.5]


async def test_embeddings_of_a_classifier_are_refused_in_words(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/embeddings", json={"input": "x"}) as answer:
        assert answer.status == 400
        assert "--task classify" in (await answer.json())["error"]["message"]


class TestLabelsThatDoNotExcludeOneAnother:
    @pytest.fixture
    def pooling(self) -> PoolingSpec:
        return replace(CLASSIFY, is_multi_label=True)

    async def test_each_has_its_sigmoid(self, http: aiohttp.ClientSession, house: Any) -> None:
        house.engine.script = lambda request: MockReply(pooled=LOGITS)
        probs = (await classify(http, input="x"))["data"][0]["probs"]
        assert probs == pytest.approx(torch.tensor(LOGITS).sigmoid().tolist(), abs=1e-7)


class TestBaseWithoutAHead:
    @pytest.fixture
    def pooling(self) -> PoolingSpec:
        return replace(CLASSIFY, labels=())

    @pytest.mark.parametrize("path", ["/classify", "/score", "/rerank"])
    async def test_base_is_refused_in_words(self, http: aiohttp.ClientSession, house: Any, path: str) -> None:
        body = {"input": "x", "text_1": "x", "text_2": "y", "query": "x", "documents": ["y"]}
        async with http.post(path, json=body) as answer:
            assert answer.status == 400
            assert "no classification head" in (await answer.json())["error"]["message"]
        assert house.engine.requests == []

    async def test_adapter_without_a_head_is_refused_and_one_with_a_head_answers(
        self, http: aiohttp.ClientSession, house: Any
    ) -> None:
        await house.register("acme/plain")
        async with http.post("/classify", json={"input": "x", "model": "acme/plain"}) as answer:
            assert answer.status == 400
        register_head(house, "acme/mood", "a", 4, None)
        assert (await classify(http, input="x", model="acme/mood"))["data"][0]["num_classes"] == 4
        async with http.post("/classify", json={"input": "x", "model": "acme/mood", "on_cold": "base"}) as answer:
            assert answer.status == 400
