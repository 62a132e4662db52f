"""Which version a name means, over HTTP: routes, canaries, rollback, aliases."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.mock_engine import MockReply


async def send(session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with session.request(method, path, json=body) as answer:
        return answer.status, await answer.json()


async def version_for(http: aiohttp.ClientSession, model: str, user: str | None = None) -> int:
    body = {"model": model, "prompt": "x", "max_tokens": 1} | ({} if user is None else {"user": user})
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return int(answer.headers["X-Adapter-Version"])


@pytest.fixture
async def three(house: Any) -> str:
    for seed in (1, 2, 3):
        await house.register("acme/a", seed=seed)
    return "acme/a"


async def test_route_moves_back_and_forth(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, three: str
) -> None:
    assert await version_for(http, three) == 3
    status, card = await send(admin, "PUT", f"/admin/adapters/{three}/route", {"version": 1})
    assert (status, card["route"]) == (200, {"version": 1, "canary": None, "history": [2, 3], "answers": []})
    assert await version_for(http, three) == 1
    assert await version_for(http, f"{three}@3") == 3
    status, card = await send(admin, "POST", f"/admin/adapters/{three}/rollback")
    assert (status, card["version"], card["route"]["history"]) == (200, 3, [2])
    assert await version_for(http, three) == 3


async def test_canary_gets_its_users_and_they_stay(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, three: str
) -> None:
    route = {"version": 1, "canary": {"version": 3, "percent": 50}}
    status, card = await send(admin, "PUT", f"/admin/adapters/{three}/route", route)
    assert (status, card["route"]["canary"]) == (200, {"version": 3, "percent": 50.0})
    users = [f"user-{number}" for number in range(40)]
    first = [await version_for(http, three, user) for user in users]
    assert set(first) == {1, 3}
    assert [await version_for(http, three, user) for user in users] == first
    assert {await version_for(http, three) for _ in range(40)} == {1, 3}  # nobody in particular: each by itself
    said = [{"role": "user", "content": "x"}]
    chat, response = {"messages": said, "max_tokens": 1}, {"input": said}
    for path, asked in (("chat/completions", chat), ("responses", response), ("messages", chat)):
        for user, version in zip(users[:10], first, strict=False):
            body = {"model": three, **asked, "safety_identifier": user}
            async with http.post(f"/v1/{path}", json=body) as answer:
                assert int(answer.headers["X-Adapter-Version"]) == version
    await send(admin, "POST", f"/admin/adapters/{three}/rollback")
    assert {await version_for(http, three, user) for user in users} == {1}


async def test_answers_of_a_canary_are_those_that_its_present_share_chose(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, three: str, house: Any
) -> None:
    async def set_share(percent: float) -> list[dict[str, int]]:
        route = {"version": 1, "canary": {"version": 3, "percent": percent}}
        card = (await send(admin, "PUT", f"/admin/adapters/{three}/route", route))[1]
        answers: list[dict[str, int]] = card["route"]["answers"]
        return answers

    none = [{"version": 1, "requests": 0, "errors": 0}, {"version": 3, "requests": 0, "errors": 0}]
    await version_for(http, three)  # before there was a canary
    assert await set_share(50) == none
    for number in range(20):
        await version_for(http, three, f"user-{number}")
    await version_for(http, f"{three}@3")  # chosen by its caller
    first, second = await set_share(50)  # the same again
    assert first["requests"] + second["requests"] == 20
    assert min(first["requests"], second["requests"]) > 0
    house.engine.script = lambda request: MockReply(delay=0.3)
    begun_before = asyncio.create_task(version_for(http, three, "user-0"))
    while not house.engine._rows:
        await asyncio.sleep(0.01)
    assert await set_share(100) == none
    await begun_before
    assert {await version_for(http, three, f"user-{number}") for number in range(3)} == {3}
    card = (await send(admin, "GET", f"/admin/adapters/{three}"))[1]
    assert [one["requests"] for one in card["route"]["answers"]] == [0, 3]
    assert sum(one["activity"]["requests"] for one in card["versions"]) == 1 + 20 + 1 + 1 + 3


async def test_old_and_new_versions_share_the_engine_and_each_answer_names_its_own(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, three: str, house: Any
) -> None:
    digests = {v.version: v.digest for v in house.services.catalog.entry(three).versions}
    for number, digest in digests.items():
        body = {"model": f"{three}@{digest}", "prompt": "x", "max_tokens": 1}
        async with http.post("/v1/completions", json=body) as answer:
            headers = answer.headers
            assert (headers["X-Adapter-Version"], headers["X-Adapter-Digest"]) == (str(number), digest)


async def test_registering_without_activating_leaves_the_route(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    await house.register("a", seed=1)
    body = {"id": "a", "source": str(house.make_adapter("a", seed=2)), "activate": False}
    status, card = await send(admin, "POST", "/admin/adapters", body)
    assert (status, card["version"], [v["version"] for v in card["versions"]]) == (201, 1, [1, 2])
    assert await version_for(http, "a") == 1
    assert await version_for(http, "a@2") == 2


@pytest.mark.many(4)
@pytest.mark.parametrize(
    "route",
    [
        {"version": 9},
        {"canary": {"version": 9, "percent": 1}},
        {"version": 1, "canary": {"version": 1, "percent": 1}},
        {"version": 1, "canary": {"version": 2, "percent": 101}},
        {"version": 1, "canary": {"version": 2}},
        {"version": "1"},
        {"version": 0},
    ],
)
async def test_route_that_makes_no_sense_is_400_and_changes_nothing(
    admin: aiohttp.ClientSession, three: str, house: Any, route: Any
) -> None:
    before = house.services.catalog.entry(three)
    status, answer = await send(admin, "PUT", f"/admin/adapters/{three}/route", route)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert house.services.catalog.entry(three) == before


async def test_rolling_back_without_a_past_is_a_conflict(admin: aiohttp.ClientSession, house: Any) -> None:
    await house.register("a")
    status, answer = await send(admin, "POST", "/admin/adapters/a/rollback")
    assert (status, answer["error"]["type"]) == (409, "conflict_error")


async def test_alias_is_a_model_name_until_it_is_removed(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, three: str
) -> None:
    status, answer = await send(admin, "PUT", "/admin/aliases/acme/live", {"target": f"{three}@2"})
    assert (status, answer) == (200, {"alias": "acme/live", "target": f"{three}@2"})
    assert await version_for(http, "acme/live") == 2
    assert (await send(admin, "GET", f"/admin/adapters/{three}"))[1]["aliases"] == ["acme/live"]
    assert (await send(admin, "GET", "/admin/aliases"))[1]["data"] == [answer]
    async with http.get("/v1/models/acme/live") as model:
        assert (await model.json())["id"] == "acme/live"
    assert (await send(admin, "DELETE", "/admin/aliases/acme/live"))[1] == {"alias": "acme/live", "deleted": True}
    async with http.post("/v1/completions", json={"model": "acme/live", "prompt": "x"}) as gone:
        assert gone.status == 404


@pytest.mark.parametrize(
    ("alias", "target", "status"),
    [("b", "nobody", 404), ("b", "acme/a@9", 404), ("acme/a", "acme/a", 409), ("b..c", "acme/a", 400)],
)
async def test_alias_that_cannot_be_is_refused(
    admin: aiohttp.ClientSession, three: str, alias: str, target: str, status: int
) -> None:
    assert (await send(admin, "PUT", f"/admin/aliases/{alias}", {"target": target}))[0] == status
    assert (await send(admin, "GET", "/admin/aliases"))[1]["data"] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/admin/adapters/a/route"), ("POST", "/admin/adapters/a/rollback"), ("PUT", "/admin/aliases/x")],
)
async def test_only_the_admin_may_route(http: aiohttp.ClientSession, house: Any, method: str, path: str) -> None:
    assert (await send(http, method, path, {}))[0] == 401


async def test_deleting_the_default_version_brings_the_one_before_back(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, three: str
) -> None:
    await send(admin, "PUT", f"/admin/adapters/{three}/route", {"version": 1})
    async with admin.delete(f"/admin/adapters/{three}?version=1") as answer:
        assert answer.status == 200
    assert await version_for(http, three) == 3


async def test_default_version_stays_while_none_of_the_others_was_ever_served(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    await house.register("acme/a", seed=1)
    await house.register("acme/a", seed=2, activate=False)
    async with admin.delete("/admin/adapters/acme/a?version=1") as answer:
        assert answer.status == 409
        assert "none of its others was served" in (await answer.json())["error"]["message"]
    assert await version_for(http, "acme/a") == 1
    await send(admin, "PUT", "/admin/adapters/acme/a/route", {"version": 2})
    async with admin.delete("/admin/adapters/acme/a?version=1") as answer:
        assert answer.status == 200
    assert await version_for(http, "acme/a") == 2
