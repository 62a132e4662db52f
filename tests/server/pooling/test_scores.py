"""/score and /rerank: a cross-encoder reads pairs, an embedding model compares vectors."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
import torch

from lora_serve.core.model_spec import PoolingSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.server.pooling.scores import create_rerank, create_score
from lora_serve.server.routes import TABLE
from lora_serve.text.tokenizer import TextModel
from tests.mock_engine import MockReply
from tests.server.conftest import BASE
from tests.server.pooling.conftest import CLASSIFY, RANK
from tests.text.tiny_tokenizer import bert_tokenizer

SCORE_PATHS = [route.path for route in TABLE.routes if route.handler is create_score]
RERANK_PATHS = [route.path for route in TABLE.routes if route.handler is create_rerank]


def by_length(request: InferenceRequest) -> MockReply:
    """Longer pairs fit better."""
    return MockReply(pooled=[len(request.prompt_token_ids) / 10])


def sigmoid_of(num_tokens: int) -> float:
    return float(torch.tensor(num_tokens / 10).sigmoid())


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


class TestCrossEncoder:
    @pytest.fixture
    def pooling(self) -> PoolingSpec:
        return RANK

    @pytest.mark.parametrize("path", SCORE_PATHS)
    async def test_one_text_is_scored_with_each_of_the_others(
        self, http: aiohttp.ClientSession, house: Any, text_model: TextModel, path: str
    ) -> None:
        house.engine.script = by_length
        body = await post(http, path, text_1="fox", text_2=["the dog", "a"], model=BASE)
        expected = [text_model.wrapper("fox", second) for second in ("the dog", "a")]
        assert [list(request.prompt_token_ids) for request in house.engine.requests] == [
            item["input_ids"] for item in expected
        ]
        assert [list(request.pooling.token_type_ids) for request in house.engine.requests] == [
            item["token_type_ids"] for item in expected
        ]
        lengths = [len(item["input_ids"]) for item in expected]
        assert [item["score"] for item in body["data"]] == pytest.approx([sigmoid_of(n) for n in lengths], abs=1e-6)
        assert [(item["index"], item["object"]) for item in body["data"]] == [(0, "score"), (1, "score")]
        assert (body["object"], body["model"]) == ("list", BASE)
        assert body["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}

    async def test_as_many_texts_are_scored_pair_by_pair(
        self, http: aiohttp.ClientSession, house: Any, encoded: Any
    ) -> None:
        body = await post(http, "/score", text_1=["fox", "dog"], text_2=["a", "b"])
        assert len(body["data"]) == 2
        prompts = [request.prompt_token_ids for request in house.engine.requests]
        assert prompts == [encoded("fox", "a"), encoded("dog", "b")]

    @pytest.mark.parametrize("path", RERANK_PATHS)
    async def test_documents_come_back_best_first(self, http: aiohttp.ClientSession, house: Any, path: str) -> None:
        house.engine.script = by_length
        documents = ["a", {"text": "the long dog"}, "the dog"]
        body = await post(http, path, query="fox", documents=documents, model=BASE)
        assert [item["index"] for item in body["results"]] == [1, 2, 0]
        assert [item["document"] for item in body["results"]] == [
            {"text": "the long dog"}, {"text": "the dog"}, {"text": "a"},
        ]  # fmt: skip
        scores = [item["relevance_score"] for item in body["results"]]
        assert scores == sorted(scores, reverse=True)
        assert body["id"].startswith("rerank-")
        assert body["model"] == BASE
        assert body["usage"]["total_tokens"] == sum(len(request.prompt_token_ids) for request in house.engine.requests)

    async def test_top_n_and_documents_left_out(self, http: aiohttp.ClientSession, house: Any) -> None:
        house.engine.script = by_length
        body = await post(http, "/rerank", query="fox", documents=["a", "the dog"], top_n=1, return_documents=False)
        (result,) = body["results"]
        assert set(result) == {"index", "relevance_score"}
        assert result["index"] == 1
        body = await post(http, "/rerank", query="fox", documents=["a", "the dog"], top_n=9)
        assert len(body["results"]) == 2

    async def test_pair_that_is_too_long_is_refused_or_cut_by_the_tokenizers_rules(
        self, http: aiohttp.ClientSession, house: Any, text_model: TextModel
    ) -> None:
        first, second = "fox " * 10, "the dog " * 20
        async with http.post("/score", json={"text_1": first, "text_2": second}) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == "context_length_exceeded"
        await post(http, "/score", text_1=first, text_2=second, truncate_prompt_tokens=20)
        (request,) = house.engine.requests
        whole = text_model.wrapper(first, second)
        assert len(request.prompt_token_ids) == 20
        assert request.prompt_token_ids[-1] == whole["input_ids"][-1]
        assert request.pooling.token_type_ids.count(0) == 10  # [CLS], 8 tokens, [SEP]

    async def test_without_activation_the_score_is_the_logit(self, http: aiohttp.ClientSession, house: Any) -> None:
        house.engine.script = lambda request: MockReply(pooled=[-1.5])
        body = await post(http, "/score", text_1="fox", text_2="a", use_activation=False)
        assert body["data"][0]["score"] == -1.5
        body = await post(http, "/rerank", query="fox", documents=["a"], use_activation=False)
        assert body["results"][0]["relevance_score"] == -1.5

    @pytest.mark.parametrize(
        "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
    )
    async def test_texts_have_all_of_vllms_names(
        self, http: aiohttp.ClientSession, house: Any, encoded: Any, names: tuple[str, str]
    ) -> None:
        body = await post(http, "/score", **dict(zip(names, ("fox", ["a", "b"]), strict=True)))
        assert len(body["data"]) == 2
        assert [request.prompt_token_ids for request in house.engine.requests] == [
            encoded("fox", "a"), encoded("fox", "b"),
        ]  # fmt: skip

    @pytest.mark.parametrize("path", ["/score", "/v1/rerank"])
    async def test_each_text_is_cut_to_tokens_of_its_own(
        self, http: aiohttp.ClientSession, house: Any, encoded: Any, path: str
    ) -> None:
        texts = {
            "text_1": "the fox runs",
            "text_2": ["jumps over"],
            "query": "the fox runs",
            "documents": ["jumps over"],
        }
        given = {name: texts[name] for name in (("text_1", "text_2") if path == "/score" else ("query", "documents"))}
        await post(http, path, **given, max_tokens_per_query=3, max_tokens_per_doc=2)
        assert [request.prompt_token_ids for request in house.engine.requests] == [encoded("the fox", "ju")]

    async def test_side_that_loses_tokens_is_the_callers(self, http: aiohttp.ClientSession, house: Any) -> None:
        oracle = bert_tokenizer()
        oracle.truncation_side = "left"
        pair = "the fox runs", "jumps over the dog"
        await post(http, "/score", text_1=pair[0], text_2=pair[1], truncate_prompt_tokens=12, truncation_side="left")
        expected = oracle(*pair, truncation=True, max_length=12)["input_ids"]
        assert list(house.engine.requests[0].prompt_token_ids) == expected


class TestClassifierOfManyLabels:
    @pytest.fixture
    def pooling(self) -> PoolingSpec:
        return CLASSIFY

    async def test_scores_are_refused_in_words(self, http: aiohttp.ClientSession) -> None:
        async with http.post("/score", json={"text_1": "a", "text_2": "b"}) as answer:
            assert answer.status == 400
            assert "one label" in (await answer.json())["error"]["message"]


class TestEmbeddingModel:
    async def test_score_is_the_cosine_of_two_embeddings(
        self, http: aiohttp.ClientSession, house: Any, encoded: Any
    ) -> None:
        vectors = {encoded("fox"): [1.0, 2.0, 0.0, 0.0], encoded("dog"): [3.0, 0.0, 4.0, 0.0], encoded("a"): [0.0] * 4}
        house.engine.script = lambda request: MockReply(pooled=vectors[request.prompt_token_ids])
        body = await post(http, "/score", text_1="fox", text_2=["dog", "fox", "a"])
        left = torch.tensor(vectors[encoded("fox")])
        expected = [
            float(torch.cosine_similarity(left, torch.tensor(vectors[encoded(text)]), dim=0))
            for text in ("dog", "fox", "a")
        ]
        assert [item["score"] for item in body["data"]] == pytest.approx(expected, abs=1e-6)
        assert len(house.engine.requests) == 4, "the first text is embedded once"

    async def test_documents_are_ranked_by_cosine(self, http: aiohttp.ClientSession, house: Any, encoded: Any) -> None:
        vectors = {encoded("fox"): [1.0, 0.0], encoded("dog"): [0.1, 1.0], encoded("cat"): [1.0, 0.1]}
        house.engine.script = lambda request: MockReply(pooled=vectors[request.prompt_token_ids])
        body = await post(http, "/rerank", query="fox", documents=["dog", "cat"])
        assert [item["document"]["text"] for item in body["results"]] == ["cat", "dog"]


@pytest.mark.many(6)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"text_1": "a"}),
        ("/score", {"text_1": [], "text_2": "a"}),
        ("/score", {"text_1": "a", "text_2": ["a", ""]}),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}),
        ("/score", {"text_1": "a", "text_2": [1, 2]}),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}),
        ("/score", {"text_1": "a", "documents": "b"}),
        ("/score", {"text_1": "a", "text_2": "b", "data_1": "a", "data_2": "c"}),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_query": 64}),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "Judge."}),
        ("/score", {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"instruction": "Judge."}}),
        ("/rerank", {"query": "a", "documents": []}),
        ("/rerank", {"query": "a", "documents": "b"}),
        ("/rerank", {"query": "", "documents": ["b"]}),
        ("/rerank", {"query": ["a"], "documents": ["b"]}),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}),
    ],
)
async def test_bad_bodies_are_400(http: aiohttp.ClientSession, house: Any, path: str, body: dict[str, Any]) -> None:
    async with http.post(path, json=body) as answer:
        assert answer.status == 400, await answer.text()
    assert house.engine.requests == []
