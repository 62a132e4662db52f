"""Real servers on tiny BERTs: vectors, labels and scores over HTTP are transformers' and PEFT's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import peft
import pytest
import torch
from openai import OpenAI
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig, PreTrainedTokenizerFast

from lora_serve.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, KEY
from tests.e2e.plain_http import call
from tests.oracle import peft_may_warn
from tests.text.tiny_tokenizer import CORPUS, bert_tokenizer

TEXTS = ["the fox", "hello world!", "wie geht es dir?", "a", CORPUS[0], CORPUS[1], "the lazy dog jumps"]
NAMES = ("acme/a", "acme/b", "globex/c")
LABELS = ["bad", "fair", "good"]
TOLERANCE = 1e-4
CLASSES = {"FEATURE_EXTRACTION": AutoModel, "SEQ_CLS": AutoModelForSequenceClassification}


class Place:
    """A model, its adapters, and what transformers and PEFT alone make of them."""

    def __init__(self, root: Path, task_type: str, adapter_labels: int | None = None) -> None:
        self.root, self.model, self._task_type = root, root / "model", task_type
        self.tokenizer: PreTrainedTokenizerFast = bert_tokenizer()
        config = BertConfig(
            vocab_size=len(self.tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=96, num_labels=1,
        )  # fmt: skip
        torch.manual_seed(1)
        model = CLASSES[task_type].from_config(config)
        _shake(model)
        model.save_pretrained(self.model)
        self.tokenizer.save_pretrained(self.model)
        self._adapter_labels = adapter_labels
        self._alone: dict[str | None, Any] = {None: self._load(None)}
        for seed, name in enumerate(NAMES):
            self._train(name, seed)

    @torch.inference_mode()
    def plain(self, adapter: str | None, *texts: str) -> torch.Tensor:
        """Of one text or pair: the mean of its hidden states with length 1, or its logits."""
        inputs = self.tokenizer(*texts, return_tensors="pt")
        output = self._alone[adapter](**inputs)
        if self._task_type == "SEQ_CLS":
            return output.logits[0]
        vector = output.last_hidden_state[0].mean(0)
        return vector / vector.norm()

    def _load(self, num_labels: int | None) -> Any:
        more = {} if num_labels is None else {"num_labels": num_labels, "ignore_mismatched_sizes": True}
        return CLASSES[self._task_type].from_pretrained(self.model, dtype=torch.float32, **more).eval()

    def _train(self, name: str, seed: int) -> None:
        folder = self.root / "adapters" / name
        settings = peft.LoraConfig(
            task_type=self._task_type, r=2 << seed, lora_alpha=8, target_modules=["query", "value", "dense"],
            modules_to_save=["classifier"] if self._task_type == "SEQ_CLS" else None,
            exclude_modules=r".*pooler.*",
        )  # fmt: skip
        with peft_may_warn():
            trained = peft.get_peft_model(self._load(self._adapter_labels), settings)
            torch.manual_seed(100 + seed)
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.3)
            trained.save_pretrained(folder)
            alone = peft.PeftModel.from_pretrained(self._load(self._adapter_labels), folder)
        self._alone[name] = alone.eval()


def _shake(model: torch.nn.Module) -> None:
    """Random weights everywhere: what starts as zeros or ones would hide mistakes."""
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.2


def serving(place: Place, *more: str) -> Iterator[ServerProcess]:
    """A server of the model, on which the adapters are registered by the admin API."""
    arguments = [
        "--model", str(place.model), "--served-model-name", "tiny", "--admin-key", KEY,
        "--store", str(place.root / "store"), "--adapter-root", str(place.root), "--max-loras", "2", *more,
    ]  # fmt: skip
    with ServerProcess(arguments, place.root / "log") as process:
        process.wait_until_ready(90)
        for name in NAMES:
            metadata = {"labels": LABELS} if name == NAMES[0] else {}
            source = str(place.root / "adapters" / name)
            reply = call(f"{process.url}/admin/adapters", {"id": name, "source": source, "metadata": metadata}, ADMIN)
            assert reply.status == 201, reply.text
        yield process


class TestEmbeddings:
    @pytest.fixture(scope="class")
    def place(self, tmp_path_factory: pytest.TempPathFactory) -> Place:
        return Place(tmp_path_factory.mktemp("embed"), "FEATURE_EXTRACTION")

    @pytest.fixture(scope="class")
    def server(self, place: Place) -> Iterator[ServerProcess]:
        yield from serving(place, "--warmup", "off")

    @pytest.fixture
    def openai(self, server: ServerProcess) -> Iterator[OpenAI]:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client

    @pytest.mark.parametrize("name", ["tiny", *NAMES])
    def test_openais_client_gets_the_vectors_of_each_adapter(self, openai: OpenAI, place: Place, name: str) -> None:
        plain = openai.embeddings.create(model=name, input=TEXTS, encoding_format="float")
        packed = openai.embeddings.create(model=name, input=TEXTS)
        assert [item.embedding for item in plain.data] == [item.embedding for item in packed.data]
        for item, text in zip(plain.data, TEXTS, strict=True):
            expected = place.plain(None if name == "tiny" else name, text).numpy()
            np.testing.assert_allclose(item.embedding, expected, atol=TOLERANCE)

    async def test_mixed_adapters_at_once_each_get_their_own(self, server: ServerProcess, place: Place) -> None:
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

    def test_shortened_vectors_have_unit_length_again(self, openai: OpenAI, place: Place) -> None:
        short = openai.embeddings.create(model="tiny", input="the fox", dimensions=8).data[0].embedding
        head = place.plain(None, "the fox")[:8]
        np.testing.assert_allclose(short, (head / head.norm()).numpy(), atol=TOLERANCE)

    def test_long_texts_are_refused_or_cut(self, server: ServerProcess, place: Place) -> None:
        text = "the quick brown fox jumps " * 20
        url = f"{server.url}/v1/embeddings"
        refused = call(url, {"input": text})
        assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
        found = call(url, {"input": text, "truncate_prompt_tokens": -1})
        cut = place.tokenizer(text, truncation=True, max_length=96)["input_ids"]
        same = call(url, {"input": cut})
        assert found.json["data"] == same.json["data"]

    def test_score_is_the_cosine(self, server: ServerProcess, place: Place) -> None:
        body = {"model": NAMES[1], "text_1": TEXTS[0], "text_2": TEXTS[1:4]}
        found = [item["score"] for item in call(f"{server.url}/score", body).json["data"]]
        left, *others = (place.plain(NAMES[1], text) for text in TEXTS[:4])
        np.testing.assert_allclose(found, [float(left @ other) for other in others], atol=TOLERANCE)

    def test_completions_are_refused_in_words_and_the_rest_of_the_api_is_there(self, server: ServerProcess) -> None:
        refused = call(f"{server.url}/v1/completions", {"prompt": "x"})
        assert refused.status == 400
        assert "--task embed" in refused.json["error"]["message"]
        models = call(f"{server.url}/v1/models").json["data"]
        assert [model["id"] for model in models] == ["tiny", *NAMES]
        assert "vllm:kv_cache_usage_perc" in call(f"{server.url}/metrics").text
        assert call(f"{server.url}/tokenize", {"prompt": "the fox"}).json["count"] > 2


class TestClassification:
    """The base has one label, a relevance; the adapters have heads of their own with three."""

    @pytest.fixture(scope="class")
    def place(self, tmp_path_factory: pytest.TempPathFactory) -> Place:
        return Place(tmp_path_factory.mktemp("classify"), "SEQ_CLS", adapter_labels=3)

    @pytest.fixture(scope="class")
    def server(self, place: Place) -> Iterator[ServerProcess]:
        yield from serving(place, "--warmup", "off")

    @pytest.mark.parametrize("name", NAMES)
    def test_adapters_heads_choose_from_their_own_labels(self, server: ServerProcess, place: Place, name: str) -> None:
        reply = call(f"{server.url}/classify", {"model": name, "input": TEXTS})
        assert reply.status == 200, reply.text
        names = LABELS if name == NAMES[0] else ["LABEL_0", "LABEL_1", "LABEL_2"]
        for item, text in zip(reply.json["data"], TEXTS, strict=True):
            expected = place.plain(name, text).softmax(-1)
            np.testing.assert_allclose(item["probs"], expected.numpy(), atol=TOLERANCE)
            assert (item["label"], item["num_classes"]) == (names[int(expected.argmax())], 3)

    @pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
    def test_documents_are_ranked_by_the_base_as_a_cross_encoder(
        self, server: ServerProcess, place: Place, path: str
    ) -> None:
        query, documents = TEXTS[0], TEXTS[1:]
        reply = call(f"{server.url}{path}", {"model": "tiny", "query": query, "documents": documents})
        assert reply.status == 200, reply.text
        expected = [float(place.plain(None, query, document).sigmoid()) for document in documents]
        results = reply.json["results"]
        assert [item["index"] for item in results] == sorted(range(len(documents)), key=lambda i: -expected[i])
        for item in results:
            assert item["relevance_score"] == pytest.approx(expected[item["index"]], abs=TOLERANCE)
            assert item["document"]["text"] == documents[item["index"]]

    async def test_heads_of_all_widths_share_the_batches(self, server: ServerProcess, place: Place) -> None:
        async with aiohttp.ClientSession(server.url) as session:

            async def ask(name: str | None, text: str) -> list[float]:
                body = {"model": name or "tiny", "input": text}
                async with session.post("/classify", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    return (await answer.json())["data"][0]["probs"]

            asks = [(name, text) for text in TEXTS for name in (None, *NAMES)]
            answers = await asyncio.gather(*(ask(name, text) for name, text in asks))
        for (name, text), probs in zip(asks, answers, strict=True):
            logits = place.plain(name, text)
            expected = logits.sigmoid() if name is None else logits.softmax(-1)
            np.testing.assert_allclose(probs, expected.numpy(), atol=TOLERANCE)

    def test_scores_of_an_adapter_with_three_labels_are_refused(self, server: ServerProcess) -> None:
        reply = call(f"{server.url}/score", {"model": NAMES[0], "text_1": "a", "text_2": "the fox"})
        assert reply.status == 400
        assert "one label" in reply.json["error"]["message"]
