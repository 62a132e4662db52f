"""A real server on a tiny BERT: labels and scores over HTTP are transformers' and PEFT's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import numpy as np
import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.plain_http import call
from tests.e2e.pooling_place import LABELS, NAMES, TEXTS, TOLERANCE, Place, serving
from tests.engine_choice import EngineHost


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("classify"), "classify")


@pytest.fixture(scope="module")
def server(engine_host: EngineHost, place: Place) -> Iterator[ServerProcess]:
    yield from serving(engine_host, place)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_heads_choose_from_their_own_labels(server: ServerProcess, place: Place, name: str) -> None:
    reply = call(f"{server.url}/classify", {"model": name, "input": TEXTS})
    assert reply.status == 200, reply.text
    names = LABELS if name == NAMES[0] else ["LABEL_0", "LABEL_1", "LABEL_2"]
    for item, text in zip(reply.json["data"], TEXTS, strict=True):
        expected = place.plain(name, text).softmax(-1)
        np.testing.assert_allclose(item["probs"], expected.numpy(), atol=TOLERANCE)
        assert (item["label"], item["num_classes"]) == (names[int(expected.argmax())], 3)


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_base_as_a_cross_encoder(server: ServerProcess, place: Place, path: str) -> None:
    query, documents = TEXTS[0], TEXTS[1:]
    reply = call(f"{server.url}{path}", {"model": "tiny", "query": query, "documents": documents})
    assert reply.status == 200, reply.text
    expected = [float(place.plain(None, query, document).sigmoid()) for document in documents]
    results = reply.json["results"]
    assert [item["index"] for item in results] == sorted(range(len(documents)), key=lambda i: -expected[i])
    for item in results:
        assert item["relevance_score"] == pytest.approx(expected[item["index"]], abs=TOLERANCE)
        assert item["document"]["text"] == documents[item["index"]]


async def test_heads_of_all_widths_share_the_batches(server: ServerProcess, place: Place) -> None:
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


def test_scores_of_an_adapter_with_three_labels_are_refused(server: ServerProcess) -> None:
    reply = call(f"{server.url}/score", {"model": NAMES[0], "text_1": "a", "text_2": "the fox"})
    assert reply.status == 400
    assert "one label" in reply.json["error"]["message"]
