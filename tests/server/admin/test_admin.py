"""The admin API: registering by path, listing, showing, residency, deleting; and that it is never open."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web

from lora_serve.core.adapter import TAKEN_ENDS
from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import Evict, Pin, Prefetch, Unpin
from lora_serve.server.app import build_app
from lora_serve.server.route import Access
from lora_serve.server.routes import TABLE
from tests.mock_engine import MockReply

BASE = "tiny-base"


async def post(session: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, Any]:
    async with session.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with session.get(path) as answer:
        return answer.status, await answer.json()


async def delete(session: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with session.delete(path) as answer:
        return answer.status, await answer.json()


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def blobs(house: Any) -> list[str]:
    return sorted(path.name for path in (house.store / "blobs").iterdir())


@pytest.fixture
def server_config(server_config: ServerConfig) -> ServerConfig:
    """Wrong keys may be tried on every route."""
    return replace(server_config, wrong_keys_per_minute=0)


async def test_every_admin_route_needs_the_key(http: aiohttp.ClientSession) -> None:
    """Even on loopback, where inference is open; every route there is, so that none is forgotten."""
    guarded = [route for route in TABLE.routes if route.access in (Access.ANY_KEY, Access.TENANT_ADMIN, Access.ADMIN)]
    assert len(guarded) >= 13
    for route in guarded:
        path = route.path.format(id="acme/a", tenant="acme", key="k")
        for method in (route.method, *(["HEAD"] if route.method == "GET" else [])):
            for headers in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "Bearer "}):
                async with http.request(method, path, json={}, headers=headers) as answer:
                    assert answer.status == 401, (method, path)
                    if method != "HEAD":
                        assert (await answer.json())["error"]["code"] == "invalid_api_key"
                    assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_registered_adapter_can_be_called_at_once(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    folder = house.make_adapter("support", rank=3)
    body = {"id": "acme/support", "source": str(folder), "metadata": {"team": "blue"}}
    status, card = await post(admin, "/admin/adapters", body)
    assert status == 201, card
    assert (card["id"], card["tenant"], card["version"], card["rank"]) == ("acme/support", "acme", 1, 3)
    assert (card["targets"], card["state"], card["metadata"]) == (["q_proj"], "registered", {"team": "blue"})
    assert card["digest"].startswith("sha256:")
    assert card["bytes"] > 0
    assert len(card["versions"]) == 1
    async with http.post("/v1/completions", json={"model": "acme/support", "prompt": "x"}) as answer:
        assert answer.headers["X-Adapter-Digest"] == card["digest"]
    _, card = await get(admin, "/admin/adapters/acme/support")
    assert (card["state"], card["tiers"]) == ("on_device", ["disk", "host", "device"])
    assert (card["hits"], card["misses"], card["loads"]) == (1, 1, 1)


async def test_same_content_again_is_200_and_new_content_a_new_version(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    body = {"id": "acme/a", "source": str(house.make_adapter("a", seed=1))}
    assert (await post(admin, "/admin/adapters", body))[0] == 201
    status, card = await post(admin, "/admin/adapters", body)
    assert (status, card["version"]) == (200, 1)
    house.make_adapter("a", seed=2)
    status, card = await post(admin, "/admin/adapters", body)
    assert (status, card["version"], [item["version"] for item in card["versions"]]) == (201, 2, [1, 2])


async def test_source_may_be_relative_to_a_root(admin: aiohttp.ClientSession, house: Any) -> None:
    house.make_adapter("support")
    assert (await post(admin, "/admin/adapters", {"id": "a", "source": "support"}))[0] == 201


async def test_tenant_may_be_given(admin: aiohttp.ClientSession, house: Any) -> None:
    body = {"id": "a", "source": str(house.make_adapter("a")), "tenant": "globex"}
    assert (await post(admin, "/admin/adapters", body))[1]["tenant"] == "globex"


@pytest.mark.many(8)
@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"source": "/etc"}, 400, "source"),
        ({"source": "/does/not/exist"}, 400, "source"),
        ({"source": "../outside"}, 400, "source"),
        ({"source": "a\u0000b"}, 400, "source"),
        ({"source": "hf://org"}, 400, "source"),
        ({"source": "ftp://host/a"}, 400, "source"),
        ({"source": "file:///etc"}, 400, "source"),
        ({"source": "https://host/a.tar"}, 400, "source"),
        ({"source": "redis://key"}, 400, "source"),
        ({"source": 5}, 400, "source"),
        ({"source": None}, 400, "source"),
        ({"id": None}, 400, "id"),
        ({"id": "../x"}, 400, "id"),
        ({"id": "a..b"}, 400, "id"),
        ({"id": "a:b"}, 400, "id"),
        ({"id": "a@1"}, 400, "id"),
        ({"id": ""}, 400, "id"),
        ({"id": "/a"}, 400, "id"),
        ({"id": "ä"}, 400, "id"),
        ({"id": "x" * 129}, 400, "id"),
        ({"id": BASE}, 409, None),
        ({"pin": "yes"}, 400, "pin"),
        ({"tenant": "a/b"}, 400, "tenant"),
        ({"metadata": [1]}, 400, "metadata"),
    ],
)
async def test_wrong_registration_is_refused_in_words(
    admin: aiohttp.ClientSession, house: Any, change: dict[str, Any], status: int, param: str | None
) -> None:
    body = {"id": "acme/a", "source": str(house.make_adapter("a")), **change}
    found, answer = await post(admin, "/admin/adapters", body)
    assert (found, answer["error"]["param"]) == (status, param), answer
    assert house.services.catalog.snapshot.names == ()


async def test_outside_and_missing_folders_are_told_apart_by_nothing(admin: aiohttp.ClientSession, house: Any) -> None:
    texts = set()
    for source in ("/etc", "/does/not/exist"):
        _, answer = await post(admin, "/admin/adapters", {"id": "a", "source": source})
        texts.add(answer["error"]["message"].replace(source, "SOURCE"))
    assert len(texts) == 1


async def test_broken_adapter_is_422_with_the_reasons(admin: aiohttp.ClientSession, house: Any) -> None:
    folder: Path = house.make_adapter("a")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    status, answer = await post(admin, "/admin/adapters", {"id": "a", "source": str(folder)})
    assert (status, answer["error"]["type"]) == (422, "invalid_adapter")
    assert "adapter_model.safetensors" in answer["error"]["message"]
    assert str(folder) not in answer["error"]["message"]


async def test_pin_prefetch_evict_reach_the_engine(admin: aiohttp.ClientSession, house: Any) -> None:
    ref = await house.register("acme/a")
    status, card = await post(admin, "/admin/adapters/acme/a/prefetch")
    assert (status, card["state"], card["pinned"]) == (200, "on_device", False)
    status, card = await post(admin, "/admin/adapters/acme/a/pin")
    assert (status, card["pinned"]) == (200, True)
    status, answer = await post(admin, "/admin/adapters/acme/a/evict")
    assert (status, answer["error"]["type"]) == (409, "conflict_error")
    assert (await post(admin, "/admin/adapters/acme/a/unpin"))[1]["pinned"] is False
    assert (await post(admin, "/admin/adapters/acme/a/evict"))[1]["state"] == "registered"
    commands = list(dict.fromkeys(house.engine.commands))  # the reconciler repeats pins
    assert commands == [Prefetch(ref), Pin(ref), Unpin(ref.digest), Evict(ref.digest)]


@pytest.mark.parametrize("verb", ["pin", "unpin", "prefetch", "evict"])
async def test_residency_of_an_unknown_adapter_is_404(admin: aiohttp.ClientSession, house: Any, verb: str) -> None:
    assert (await post(admin, f"/admin/adapters/acme/nobody/{verb}"))[0] == 404
    assert house.engine.commands == []


async def test_pin_that_cannot_be_done_is_taken_back(admin: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/a")
    house.engine.command_error = AdapterUnavailableError("every slot is pinned")
    status, answer = await post(admin, "/admin/adapters/acme/a/pin")
    assert (status, answer["error"]["message"]) == (503, "every slot is pinned")
    assert house.services.catalog.entry("acme/a").pinned is False


async def test_adapter_may_be_pinned_as_it_is_registered(admin: aiohttp.ClientSession, house: Any) -> None:
    body = {"id": "a", "source": str(house.make_adapter("a", seed=1)), "pin": True}
    status, card = await post(admin, "/admin/adapters", body)
    assert (status, card["pinned"], card["state"]) == (201, True, "on_device")
    assert card["warnings"] == []


async def test_registration_stands_even_if_its_pin_fails(admin: aiohttp.ClientSession, house: Any) -> None:
    house.engine.command_error = AdapterUnavailableError("every slot is pinned")
    body = {"id": "a", "source": str(house.make_adapter("a")), "pin": True}
    status, card = await post(admin, "/admin/adapters", body)
    assert (status, card["pinned"]) == (201, False)
    assert "every slot is pinned" in card["warnings"][0]


async def test_new_version_of_a_pinned_adapter_takes_over_its_pin(admin: aiohttp.ClientSession, house: Any) -> None:
    old = await house.register("a", seed=1)
    await post(admin, "/admin/adapters/a/pin")
    _, card = await post(admin, "/admin/adapters", {"id": "a", "source": str(house.make_adapter("a", seed=2))})
    assert (card["pinned"], card["state"]) == (True, "on_device")
    new = house.services.catalog.resolve("a").ref
    await until(lambda: {Pin(new), Unpin(old.digest)} <= set(house.engine.commands))


async def test_deleted_adapter_is_gone_at_once_and_its_bytes_soon(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    ref = await house.register("acme/a")
    assert len(blobs(house)) == 1
    status, answer = await delete(admin, "/admin/adapters/acme/a")
    assert (status, answer["deleted"]) == (200, True)
    async with http.post("/v1/completions", json={"model": "acme/a", "prompt": "x"}) as refused:
        assert refused.status == 404
    await until(lambda: blobs(house) == [])
    assert Evict(ref.digest, forget=True) in house.engine.commands
    assert (await delete(admin, "/admin/adapters/acme/a"))[0] == 404


async def test_running_request_of_a_deleted_adapter_finishes(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    await house.register("acme/a")
    house.engine.script = lambda request: MockReply(delay=0.02)
    body = {"model": "acme/a", "prompt": "x", "max_tokens": 5}
    async with http.post("/v1/completions", json={**body, "stream": True}) as answer:
        assert (await delete(admin, "/admin/adapters/acme/a"))[0] == 200
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_one_version_may_be_deleted(admin: aiohttp.ClientSession, house: Any) -> None:
    await house.register("a", seed=1)
    await house.register("a", seed=2)
    assert (await delete(admin, "/admin/adapters/a?version=2"))[0] == 200
    _, card = await get(admin, "/admin/adapters/a")
    assert (card["version"], len(card["versions"])) == (1, 1)
    assert (await delete(admin, "/admin/adapters/a?version=7"))[0] == 404
    assert (await delete(admin, "/admin/adapters/a?version=x"))[0] == 400


async def test_content_that_another_id_names_keeps_its_bytes(admin: aiohttp.ClientSession, house: Any) -> None:
    folder = house.make_adapter("shared")
    for name in ("a", "b"):
        await post(admin, "/admin/adapters", {"id": name, "source": str(folder)})
    await delete(admin, "/admin/adapters/a")
    await house.services.background.close()
    assert len(blobs(house)) == 1
    assert not any(isinstance(command, Evict) for command in house.engine.commands)


async def test_deleted_and_registered_again_is_a_new_life(admin: aiohttp.ClientSession, house: Any) -> None:
    body = {"id": "a", "source": str(house.make_adapter("a"))}
    for _ in range(3):
        assert (await post(admin, "/admin/adapters", body))[0] == 201
        assert (await delete(admin, "/admin/adapters/a"))[0] == 200
    assert (await post(admin, "/admin/adapters", body))[0] == 201
    await house.services.background.close()
    assert len(blobs(house)) == 1


async def test_content_that_is_registered_again_meanwhile_is_not_evicted(
    admin: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"id": "a", "source": str(house.make_adapter("a"))}
    await post(admin, "/admin/adapters", body)
    gate, adapters = asyncio.Event(), house.engine.adapters

    async def slow(command: Any) -> None:
        await gate.wait()
        await adapters(command)

    monkeypatch.setattr(house.engine, "adapters", slow)
    await delete(admin, "/admin/adapters/a")
    await post(admin, "/admin/adapters", body)
    gate.set()
    await house.services.background.close()
    assert not any(isinstance(command, Evict) for command in house.engine.commands)
    assert len(blobs(house)) == 1


async def test_ids_may_be_percent_encoded_and_end_like_a_verb(admin: aiohttp.ClientSession, house: Any) -> None:
    await house.register("acme/pin")
    for path in ("acme/pin", quote("acme/pin", safe="")):
        assert (await get(admin, f"/admin/adapters/{path}"))[1]["id"] == "acme/pin"
    status, card = await post(admin, "/admin/adapters/acme/pin/pin")
    assert (status, card["id"], card["pinned"]) == (200, "acme/pin", True)
    assert (await post(admin, f"/admin/adapters/{quote('acme/pin', safe='')}/unpin"))[1]["pinned"] is False


async def test_engine_shows_its_inside(admin: aiohttp.ClientSession, house: Any) -> None:
    ref = await house.register("acme/a")
    await post(admin, "/admin/adapters/acme/a/pin")
    status, stats = await get(admin, "/admin/engine")
    assert status == 200
    assert stats["slots"][0]["digest"] == ref.digest
    assert stats["slots"][0]["pinned"] is True
    assert {"num_running", "num_waiting", "num_free_blocks", "recent_batches", "tiers"} <= set(stats)


async def test_catalog_is_shown_even_while_the_engine_is_down(admin: aiohttp.ClientSession, house: Any) -> None:
    await house.register("a")
    await house.engine.stop()
    house.engine.stats = _no_stats
    assert (await get(admin, "/admin/adapters"))[1]["data"][0]["state"] == "registered"


async def _no_stats() -> Any:
    raise AdapterUnavailableError("down")


async def test_leaving_client_does_not_break_off_its_registration(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun is finished, pin included: nothing is left half done."""
    folder = house.make_adapter("a")
    gate = asyncio.Event()
    adapters = house.engine.adapters

    async def slow(command: Any) -> None:
        await gate.wait()
        await adapters(command)

    monkeypatch.setattr(house.engine, "adapters", slow)
    async with aiohttp.ClientSession(house.url, headers={"Authorization": "Bearer admin-key-of-the-tests"}) as session:
        task = asyncio.create_task(post(session, "/admin/adapters", {"id": "a", "source": str(folder), "pin": True}))
        await until(lambda: house.services.catalog.snapshot.names == ("a",))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    gate.set()
    await house.services.background.close()
    assert {type(command) for command in house.engine.commands} == {Pin}


async def test_store_that_cannot_be_written_is_503(admin: aiohttp.ClientSession, house: Any) -> None:
    folder = house.make_adapter("a")
    shutil.rmtree(house.store / "tmp", ignore_errors=True)
    (house.store / "tmp").write_text("in the way")
    status, answer = await post(admin, "/admin/adapters", {"id": "a", "source": str(folder)})
    assert (status, answer["error"]["code"]) == (503, "adapter_unavailable")


def test_application_needs_no_running_loop(services: Any) -> None:
    assert isinstance(build_app(services), web.Application)


async def test_ids_that_an_upload_could_not_reach_are_refused(admin: aiohttp.ClientSession, house: Any) -> None:
    """Of two routes that fit a URL the first is taken: those with a word behind the id."""
    ids = [route.path for route in TABLE.routes if (route.method, route.path) != ("PUT", "/admin/adapters/{id}")]
    words = {path.rpartition("/")[2] for path in ids if path.startswith("/admin/adapters/{id}/")}
    uploads = {route.path.rpartition("/")[2] for route in TABLE.routes if route.method == "PUT"}
    assert words & uploads == set(TAKEN_ENDS)
    folder = str(house.make_adapter("a"))
    for word in sorted(words):
        status, answered = await post(admin, "/admin/adapters", {"id": f"acme/{word}", "source": folder})
        assert status == (400 if word in TAKEN_ENDS else 201), (word, answered)
        if status == 201:
            assert (await admin.post(f"/admin/adapters/acme/{word}/prefetch")).status == 200
            assert (await delete(admin, f"/admin/adapters/acme/{word}"))[0] == 200
    assert (await post(admin, "/admin/adapters", {"id": "route", "source": folder}))[0] == 201


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/admin/adapters/live"), ("POST", "/admin/adapters/live/pin")])
async def test_act_on_an_alias_says_what_it_is(
    admin: aiohttp.ClientSession, house: Any, method: str, path: str
) -> None:
    await house.register("acme/a")
    assert (await admin.put("/admin/aliases/live", json={"target": "acme/a"})).status == 200
    async with admin.request(method, path) as answer:
        message = (await answer.json())["error"]["message"]
    assert answer.status == 400
    assert "an alias of `acme/a`" in message
    assert "DELETE /admin/aliases/live" in message
    assert "acme/a" in house.services.catalog.snapshot.entries
