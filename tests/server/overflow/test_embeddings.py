"""Embeddings of a neighbour."""

from __future__ import annotations

import base64
import struct
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lora_serve.core.setting_groups.overflow import OverflowConfig
from tests.server.conftest import House
from tests.server.overflow.conftest import Actor, outcomes, overflow_of
from tests.server.pooling.conftest import encoded, pooling, spec, text_model

__all__ = ["encoded", "pooling", "spec", "text_model"]
GOOD = struct.pack("<4f", 0.5, -0.5, 0.5, 0.5)


def vectors(*values: bytes) -> Any:
    async def answer(request: web.Request) -> web.Response:
        data = [{"index": 0, "embedding": base64.b64encode(value).decode()} for value in values]
        return web.json_response({"object": "list", "data": data})

    return answer


@pytest.fixture
def overflow_config(actor: Actor) -> OverflowConfig:
    return OverflowConfig(overflow=(f"near={actor.url}",), overflow_after_ms=0)


@pytest.fixture
async def waiting(house: House) -> None:
    """As if the queue was long."""
    overflow_of(house)._gate.predicted_wait = lambda rows: 9.0  # type: ignore[method-assign]


async def embeddings(http: aiohttp.ClientSession, path: str = "/v1/embeddings") -> tuple[Any, bool]:
    async with http.post(path, json={"model": "tiny-base", "input": ["a", "b"]}) as answered:
        assert answered.status == 200, await answered.text()
        return await answered.json(), "X-Served-By" in answered.headers


@pytest.mark.usefixtures("waiting")
async def test_vectors_of_the_neighbour_are_shown(
    house: House, actor: Actor, http: aiohttp.ClientSession, encoded: Any
) -> None:
    actor.answer = vectors(GOOD)
    body, has_left = await embeddings(http)
    assert has_left
    assert [item["embedding"] for item in body["data"]] == [[0.5, -0.5, 0.5, 0.5]] * 2
    assert sorted(sent["input"] for sent in actor.bodies) == sorted(list(encoded(text)) for text in "ab")
    assert actor.bodies[0]["model"] == "tiny-base"
    assert house.engine.requests == []


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize(
    "answer",
    [
        vectors(GOOD, GOOD),
        vectors(GOOD[:-4]),
        vectors(struct.pack("<4f", float("nan"), 0, 0, 0)),
        vectors(b"\0" * 10**6),
        vectors(),
    ],
    ids=["two", "short", "nan", "huge", "none"],
)
async def test_what_is_no_vector_is_computed_here(
    house: House, actor: Actor, http: aiohttp.ClientSession, answer: Any
) -> None:
    actor.answer = answer
    _, has_left = await embeddings(http)
    assert not has_left
    assert await outcomes(house) == {"garbled": 2}
    assert len(house.engine.requests) == 2
