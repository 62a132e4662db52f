"""Every way to name an adapter, with every `on_cold`: which version is asked, and which one may answer in its place."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from lora_serve.adapters.catalog.entry import Canary
from lora_serve.core.request import OnCold
from tests.server.conftest import ADMIN, BASE

ID, PINNED_ALIAS, ALIAS = "acme/bot", "acme/live", "acme/newest"
DEFAULT, BEFORE, CANARY, FIRST = 3, 2, 4, 1  # versions: the id's, the one before it, its canary, the alias's own
NOBODY = None  # nobody answers in its place: it is waited for

PLACES = {
    "model": lambda name: ({"model": name}, {}),
    "base:adapter": lambda name: ({"model": f"{BASE}:{name}"}, {}),
    "adapter_id": lambda name: ({"adapter_id": name}, {}),
    "adapters": lambda name: ({"adapters": [{"id": name}]}, {}),
    "header": lambda name: ({}, {"X-Adapter-Id": name}),
    "header and model": lambda name: ({"model": ID}, {"X-Adapter-Id": name}),
}
# What is named, the version that is asked, and the one before it; "refused": 400, as the caller named a version.
NAMES: dict[str, tuple[str, int, int | str | None]] = {
    "the id": (ID, DEFAULT, BEFORE),
    "a version's number": (f"{ID}@2", 2, "refused"),
    "a version's digest": (f"{ID}@digest-of-2", 2, "refused"),
    "an alias of the id": (ALIAS, DEFAULT, BEFORE),
    "an alias of a version": (PINNED_ALIAS, FIRST, NOBODY),
    "an alias with a version": (f"{ALIAS}@2", 2, "refused"),
}


@pytest.fixture
async def digests(house: Any) -> dict[int, str]:
    """Versions 1, 2, 3 of one id, which means the third; and 4, to be its canary."""
    refs = [await house.register(ID, seed, activate=seed < CANARY) for seed in range(1, 5)]
    catalog = house.services.catalog
    catalog.set_alias(PINNED_ALIAS, f"{ID}@{FIRST}")
    catalog.set_alias(ALIAS, ID)
    return {ref.version: ref.digest for ref in refs}


@pytest.mark.many(8)
@pytest.mark.parametrize("on_cold", OnCold)
@pytest.mark.parametrize("what", NAMES)
async def test_name_alone_decides_who_answers_for_a_cold_adapter(
    http: aiohttp.ClientSession, house: Any, digests: dict[int, str], what: str, on_cold: OnCold
) -> None:
    name, version, previous = NAMES[what]
    expected = {OnCold.BASE: [], OnCold.PREVIOUS: previous}.get(on_cold, NOBODY)
    for place in PLACES.values():
        fields, headers = place(name.replace("digest-of-2", digests[2]))
        body = {"prompt": "x", "max_tokens": 1, "on_cold": on_cold, **fields}
        async with http.post("/v1/completions", json=body, headers=headers) as answer:
            text = await answer.text()
            assert answer.status == (400 if expected == "refused" else 200), text
            assert ("without a version" in text) == (expected == "refused")
    assert len(house.engine.requests) == (0 if expected == "refused" else len(PLACES))
    for request in house.engine.requests:
        assert [use.ref.digest for use in request.adapters] == [digests[version]]
        others = None if request.fallback is None else [use.ref.digest for use in request.fallback]
        assert others == ([digests[expected]] if isinstance(expected, int) else expected)


@pytest.mark.parametrize("name", [ID, ALIAS])
async def test_default_version_answers_for_a_cold_canary(
    http: aiohttp.ClientSession, house: Any, digests: dict[int, str], name: str
) -> None:
    house.services.catalog.set_route(ID, None, Canary(CANARY, 100.0))
    body = {"prompt": "x", "max_tokens": 1, "on_cold": "previous", "model": name}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
    (request,) = house.engine.requests
    assert [use.ref.digest for use in request.adapters] == [digests[CANARY]]
    assert [use.ref.digest for use in request.fallback] == [digests[DEFAULT]]


async def test_nobody_answers_for_a_version_that_an_alias_names_though_it_is_the_canary(
    http: aiohttp.ClientSession, house: Any, digests: dict[int, str]
) -> None:
    catalog = house.services.catalog
    catalog.set_route(ID, None, Canary(CANARY, 100.0))
    catalog.set_alias(PINNED_ALIAS, f"{ID}@{CANARY}")
    body = {"prompt": "x", "max_tokens": 1, "on_cold": "previous", "model": PINNED_ALIAS}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
    (request,) = house.engine.requests
    assert [use.ref.digest for use in request.adapters] == [digests[CANARY]]
    assert request.fallback is None


@pytest.mark.parametrize("on_cold", OnCold)
async def test_several_adapters_have_the_base_alone_in_their_place(
    http: aiohttp.ClientSession, house: Any, digests: dict[int, str], on_cold: OnCold
) -> None:
    await house.register("acme/other", 9)
    adapters = [{"id": PINNED_ALIAS}, {"id": "acme/other"}]
    body = {"prompt": "x", "max_tokens": 1, "on_cold": on_cold, "adapters": adapters}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == (400 if on_cold is OnCold.PREVIOUS else 200)
    fallbacks = [request.fallback for request in house.engine.requests]
    assert fallbacks == {OnCold.PREVIOUS: [], OnCold.BASE: [()]}.get(on_cold, [None])


@pytest.mark.parametrize("target", [PINNED_ALIAS, ALIAS, f"{ALIAS}@2"])
async def test_alias_of_an_alias_is_refused(house: Any, http: aiohttp.ClientSession, digests: Any, target: str) -> None:
    async with http.put("/admin/aliases/acme/second", json={"target": target}, headers=ADMIN) as answer:
        assert answer.status == 404, await answer.text()
    async with http.post("/v1/completions", json={"model": "acme/second", "prompt": "x"}) as answer:
        assert answer.status == 404


async def test_version_that_an_alias_names_is_held_against_one_that_the_request_names(
    http: aiohttp.ClientSession, house: Any, digests: dict[int, str]
) -> None:
    for model, status in ((f"{ID}@2", 400), (f"{ID}@{FIRST}", 200), (ID, 200), (ALIAS, 200)):
        body = {"prompt": "x", "max_tokens": 1, "model": model, "adapter_id": PINNED_ALIAS}
        async with http.post("/v1/completions", json=body) as answer:
            assert answer.status == status, await answer.text()
    assert {use.ref.version for request in house.engine.requests for use in request.adapters} == {FIRST}
