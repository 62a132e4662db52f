"""GET /admin/usage: what was metered, for whom it is, as JSON and CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import threading
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.core.errors import InternalError
from lora_serve.core.stats import EMPTY, ReplicaState, ReplicaStats, SlotInfo, merged
from lora_serve.core.tenant import Role
from lora_serve.server.upkeep import record_residency
from lora_serve.tenancy.metering import summed
from tests.mock_engine import TIMINGS, MockReply
from tests.server.accounting.conftest import NewKey, bearer, complete
from tests.server.conftest import BASE, House
from tests.tenancy.limited import Clock


async def usage(http: aiohttp.ClientSession, **query: str) -> list[dict[str, Any]]:
    async with http.get("/admin/usage", params=query) as response:
        assert response.status == 200, await response.text()
        body = await response.json()
        assert body["is_complete"] is True
        return list(body["data"])


async def test_usage_is_what_the_answers_said_it_was(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret, ref = new_key("acme"), await house.register("acme/support")
    house.engine.script = lambda request: MockReply(token_ids=[5, 6, 7], num_cached_tokens=2)
    body = {"model": "acme/support", "prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 9}
    async with http.post("/v1/completions", json=body, headers=bearer(secret)) as response:
        said = (await response.json())["usage"]
    await complete(http, secret)
    (base,) = await usage(admin, adapter=BASE)
    (adapted,) = await usage(admin, adapter="acme/support", by="tenant,version,digest,key")
    assert (adapted["requests"], adapted["prompt_tokens"], adapted["generated_tokens"]) == (
        1,
        said["prompt_tokens"],
        said["completion_tokens"],
    )
    assert adapted["cached_tokens"] == said["prompt_tokens_details"]["cached_tokens"]
    assert (adapted["tenant"], adapted["version"], adapted["digest"]) == ("acme", "1", ref.digest)
    assert adapted["key"] == secret.split("-")[1]
    assert adapted["queue_seconds"] == pytest.approx(4 * TIMINGS.queue)
    assert adapted["load_seconds"] == pytest.approx(4 * TIMINGS.load)
    assert adapted["compute_seconds"] >= 4 * TIMINGS.prefill
    assert (base["requests"], base["prompt_tokens"], base["generated_tokens"]) == (1, 4, 2)


async def test_echo_alone_is_metered_without_the_token_that_nobody_sees(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 0, "echo": True}
    async with http.post("/v1/completions", json=body, headers=bearer(new_key("acme"))) as response:
        assert response.status == 200
    (base,) = await usage(admin, adapter=BASE)
    assert (base["prompt_tokens"], base["generated_tokens"]) == (3, 0)


async def test_what_failed_before_its_prompt_was_computed_is_not_metered(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    house.engine.script = lambda request: MockReply(error=InternalError("broken"))
    assert (await complete(http, new_key("acme"))).status == 500
    assert await usage(admin) == []
    house.engine.script = lambda request: MockReply(error=InternalError("broken"), error_after=1)
    assert (await complete(http, new_key("acme"))).status == 500
    assert [(row["requests"], row["generated_tokens"]) for row in await usage(admin, by="tenant")] == [(1, 1)]


async def test_usage_is_summed_as_asked_and_only_of_the_time_asked(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey, clock: Clock
) -> None:
    one, two = new_key("acme"), new_key("acme")
    for secret in (one, two, two):
        await complete(http, secret)
    start = clock.now
    clock.now += 86_400
    await complete(http, one)
    await complete(http, new_key("globex"))
    assert [row["requests"] for row in await usage(admin, by="tenant")] == [4, 1]
    assert [row["requests"] for row in await usage(admin, by="")] == [5]
    assert [row["requests"] for row in await usage(admin, by="day")] == [3, 2]
    assert sorted(row["requests"] for row in await usage(admin, by="key", tenant="acme")) == [2, 2]
    assert [row["requests"] for row in await usage(admin, by="", **{"from": str(int(start) + 3600)})] == [2]
    assert [row["requests"] for row in await usage(admin, by="", to=str(int(start) + 1))] == [3]
    assert await usage(admin, tenant="nobody") == []


async def test_tenants_admin_sees_its_own_usage_only(
    house: House, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    own = new_key("acme", role=Role.TENANT_ADMIN)
    await complete(http, new_key("globex"))
    await complete(http, own)
    async with aiohttp.ClientSession(house.url, headers=bearer(own)) as client:
        assert [row["tenant"] for row in await usage(client)] == ["acme"]
        assert await usage(client, tenant="globex") == await usage(client, tenant="no-such-tenant") == []
    async with http.get("/admin/usage", headers=bearer(new_key("acme"))) as response:
        assert response.status == 403


async def test_figures_of_many_are_added_up_beside_the_event_loop(
    http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year of a thousand tenants takes seconds, in which everybody's streams would stand still."""
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly(*given: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60), "nobody else was served meanwhile"
        return summed(*given)

    monkeypatch.setattr("lora_serve.server.admin.records.summed", slowly)
    adding = asyncio.create_task(usage(admin, by=""))
    await begun.wait()
    assert (await complete(http, new_key("acme"))).status == 200
    go_on.set()
    await adding


async def test_bounds_that_are_left_empty_are_none(admin: aiohttp.ClientSession) -> None:
    async with admin.get("/admin/usage?from=&to=") as answer:
        found = await answer.json()
    assert (found["from"], found["to"]) == (0, None)
    assert found["by"] == ["tenant", "adapter", "version", "key"]


async def test_csv_holds_the_same_figures(
    house: House, http: aiohttp.ClientSession, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    await complete(http, new_key("acme"))
    rows = await usage(admin)
    async with admin.get("/admin/usage?format=csv") as by_query:
        text = await by_query.text()
    async with admin.get("/admin/usage", headers={"Accept": "text/csv"}) as by_header:
        assert by_header.content_type == "text/csv"
        assert await by_header.text() == text
    table = list(csv.DictReader(io.StringIO(text)))
    assert [{name: str(value) for name, value in row.items()} for row in rows] == table


async def test_residency_is_its_owners_by_version(house: House, admin: aiohttp.ClientSession, new_key: NewKey) -> None:
    new_key("acme")
    ref = await house.register("acme/support")
    slots = (SlotInfo(1, 1, ref.digest, ref.name, 1000, 0, False), SlotInfo(2, 1, "sha256:x", "gone", 1000, 0, False))
    record_residency(house.services, replace(EMPTY, slots=slots), 2.5)
    (row,) = await usage(admin)
    assert (row["tenant"], row["version"], row["residency_byte_seconds"], row["requests"]) == ("acme", "1", 2500.0, 0)


async def test_servers_of_one_fleet_meter_their_parts_of_it(
    house: House, admin: aiohttp.ClientSession, new_key: NewKey
) -> None:
    """An adapter on two replicas takes twice the room; each server adds its share to the usage of all."""
    new_key("acme")
    ref = await house.register("acme/support")
    stats = replace(EMPTY, slots=(SlotInfo(1, 1, ref.digest, ref.name, 1000, 0, False),))
    fleet = merged(
        [
            ReplicaStats("a", "10.0.0.1", ReplicaState.READY, num_servers=1, stats=stats),
            ReplicaStats("b", "10.0.0.2", ReplicaState.READY, num_servers=4, stats=stats),
        ]
    )
    record_residency(house.services, fleet, 2.0)
    (row,) = await usage(admin)
    assert row["residency_byte_seconds"] == 2000.0 + 2000.0 / 4


@pytest.mark.parametrize(
    "query", ["by=password", "from=yesterday", "to=-1", "from=9&to=1", "format=xml", "from=99999999999999999999"]
)
async def test_wrong_question_is_400(admin: aiohttp.ClientSession, query: str) -> None:
    async with admin.get(f"/admin/usage?{query}") as response:
        assert response.status == 400, await response.text()


@pytest.mark.parametrize("query", ["from=2031-05-01", "from=2001-05-01T00:00:00Z&to=2031-05-01T00:00:00%2B02:00"])
async def test_times_may_be_dates(admin: aiohttp.ClientSession, query: str) -> None:
    async with admin.get(f"/admin/usage?{query}") as response:
        assert response.status == 200, await response.text()
