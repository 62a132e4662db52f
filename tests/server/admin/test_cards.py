"""What a registration shows of an adapter, and that one without effect is taken only if asked for."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import aiohttp
import pytest

from lora_serve.adapters.catalog.entry import CatalogEntry, Route, VersionEntry
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.figures import LoadTimes
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.stats import AdapterCounters
from lora_serve.server.admin.card import adapter_card, figures_of
from lora_serve.server.answers import written
from tests.mock_engine import MockEngineClient

NOTHING = SmokeTestResult(logit_change=1e-9, noise=1e-9, logit_scale=4.0)


async def sent(
    session: aiohttp.ClientSession, method: str, path: str, body: Any = None, data: Any = None
) -> tuple[int, Any]:
    async with session.request(method, path, json=body, data=data) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await answer.json() if is_json else await answer.text()


async def test_card_shows_probe_kinds_warnings_and_base(admin: aiohttp.ClientSession, house: Any) -> None:
    house.verifier.result = SmokeTestResult(logit_change=0.25, noise=0.0, logit_scale=4.0)
    settings = {"use_dora": True, "base_model_name_or_path": "somewhere/Other-Base", "inference_mode": True}
    body = {"id": "a", "source": str(house.make_adapter("a", **settings))}
    status, card = await sent(admin, "POST", "/admin/adapters", body)
    assert status == 201, card
    assert card["probe"] == {"max_logit_change": 0.25, "max_logit": 4.0}
    assert (card["kinds"], card["composable"], card["invocation_tokens"]) == (["use_dora"], False, [])
    assert card["base_fingerprint"] == house.services.spec.fingerprint
    assert [("other-base" in text, "tiny-base" in text) for text in card["warnings"]] == [(True, True)]
    assert not {"traits", "kinds", "probe", "warnings", "targets"} & set(card["config"])
    assert card["config"]["lora_alpha"] == 4
    assert card["versions"][0]["probe"] == card["probe"]
    assert (await sent(admin, "GET", "/admin/adapters/a"))[1] == card
    assert (await sent(admin, "GET", "/admin/adapters"))[1]["data"] == [card]


async def test_each_version_has_its_own_facts(admin: aiohttp.ClientSession, house: Any) -> None:
    await house.register("a", seed=1)
    house.verifier.result = SmokeTestResult(logit_change=0.5, noise=0.0, logit_scale=2.0)
    await house.register("a", seed=2, settings={"alora_invocation_tokens": [5, 6]})
    _, card = await sent(admin, "GET", "/admin/adapters/a")
    old, new = card["versions"]
    assert (old["probe"]["max_logit_change"], new["probe"]["max_logit_change"]) == (1.0, 0.5)
    assert (old["kinds"], new["kinds"]) == ([], ["alora_invocation_tokens"])
    assert (card["invocation_tokens"], card["composable"]) == ([5, 6], True)


def test_large_card_is_shown_in_full_again_and_again() -> None:
    """A large answer is emptied while it is written, and is nobody else's."""
    large = {str(key): 10**30 + key for key in range(3000)}
    summary: dict[str, Any] = {"targets": [f"module_{number}" for number in range(3000)], "own": large}
    metadata = {"deep": {"large": large, "half": "\ud800"}}
    version = VersionEntry(1, "sha256:" + "0" * 64, 2, 100, summary, "upload", 1.5)
    entry = CatalogEntry("acme/a", "acme", False, 1.5, metadata, 1, Route(1), (version,))
    for _ in range(2):
        shown = json.loads(b"".join(written({"data": [adapter_card(entry)]})))["data"][0]
        assert shown["metadata"] == metadata
        for part in (shown, shown["versions"][0]):
            assert (part["targets"], part["config"]["own"]) == (summary["targets"], large)
    assert len(large) == len(summary["targets"]) == 3000


async def test_pin_that_failed_is_a_warning_beside_the_registrations_own(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    house.engine.command_error = AdapterUnavailableError("every slot is pinned")
    folder = house.make_adapter("a", base_model_name_or_path="meta/other")
    _, card = await sent(admin, "POST", "/admin/adapters", {"id": "a", "source": str(folder), "pin": True})
    assert ["'other'" in card["warnings"][0], "every slot is pinned" in card["warnings"][1]] == [True, True]


def test_version_registered_before_probes_were_made_still_has_a_card() -> None:
    version = VersionEntry(1, "sha256:00", 2, 10, {"r": 2, "targets": ["q_proj"]}, "folder x", 0.0)
    card = adapter_card(CatalogEntry("a", "default", False, 0.0, {}, 1, Route(1), (version,)))
    assert (card["probe"], card["kinds"], card["warnings"], card["base_fingerprint"]) == (None, [], [], None)
    assert card["config"] == {"r": 2}


def upload_of(folder: Any, **fields: str) -> aiohttp.FormData:
    form = aiohttp.FormData(fields)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        form.add_field(name, (folder / name).read_bytes(), filename=name)
    return form


@pytest.mark.parametrize("way", ["post", "put, field", "put, query", "vllm"])
async def test_adapter_that_changes_nothing_needs_allow_noop(
    admin: aiohttp.ClientSession, house: Any, way: str
) -> None:
    house.verifier.result = NOTHING
    folder = house.make_adapter("a")

    async def register(**allow: Any) -> tuple[int, Any]:
        texts = {name: str(value).lower() for name, value in allow.items()}
        if way == "post":
            return await sent(admin, "POST", "/admin/adapters", {"id": "a", "source": str(folder), **allow})
        if way == "vllm":
            body = {"lora_name": "a", "lora_path": str(folder), **allow}
            return await sent(admin, "POST", "/v1/load_lora_adapter", body)
        if way == "put, field":
            return await sent(admin, "PUT", "/admin/adapters/a", data=upload_of(folder, **texts))
        query = "&".join(f"{name}={text}" for name, text in texts.items())
        return await sent(admin, "PUT", f"/admin/adapters/a?{query}", data=upload_of(folder))

    for refused in (await register(), await register(allow_noop=False)):
        expected = (400, "BadRequestError") if way == "vllm" else (422, "invalid_adapter")
        assert (refused[0], refused[1]["error"]["type"]) == expected
        assert "changes nothing" in refused[1]["error"]["message"]
    assert (await sent(admin, "GET", "/admin/adapters/a"))[0] == 404
    status, taken = await register(allow_noop=True)
    assert status == (200 if way == "vllm" else 201), taken
    _, card = await sent(admin, "GET", "/admin/adapters/a")
    assert card["probe"] == {"max_logit_change": 0.0, "max_logit": 4.0}


async def test_adapter_that_gives_no_numbers_is_refused_even_so(admin: aiohttp.ClientSession, house: Any) -> None:
    house.verifier.result = SmokeTestResult(float("nan"), 0.0, 4.0)
    body = {"id": "a", "source": str(house.make_adapter("a")), "allow_noop": True}
    status, answer = await sent(admin, "POST", "/admin/adapters", body)
    assert (status, answer["error"]["type"]) == (422, "invalid_adapter")


async def test_card_shows_where_the_time_of_the_last_load_went() -> None:
    entry = CatalogEntry(
        "a", "default", False, 0.0, {}, 1, Route(1), (VersionEntry(1, "sha256:00", 2, 10, {}, "folder x", 0.0),)
    )
    assert adapter_card(entry)["last_load"] is None
    times = LoadTimes("redis", fetch=0.1, verify=0.02, parse=0.003, fold=0.004, copy=0.0005)
    counters = {"sha256:00": AdapterCounters(last_load=times)}
    stats = dataclasses.replace(await MockEngineClient(50).stats(), adapters=counters)
    split = {"tier": "redis", "fetch_ms": 100.0, "verify_ms": 20.0, "parse_ms": 7.0, "copy_ms": 0.5}
    assert adapter_card(entry, figures_of(stats))["last_load"] == split
