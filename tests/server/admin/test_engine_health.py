"""GET /admin/engine/health: warm-up, restarts, queue, store, Redis; for the admin alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.server.admin.engine import JournalCard, RedisCard, redis_card
from lora_serve.server.lifecycle import MAX_RESTARTS, EngineHistory
from tests.server.conftest import ADMIN

PATH = "/admin/engine/health"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_health_tells_warm_up_queue_and_limits(http: aiohttp.ClientSession, house: Any) -> None:
    with house.services.history.stage("8 x 8 tokens, LoRA"):
        pass
    house.services.history.ready()
    async with http.get(PATH, headers=ADMIN) as answer:
        told = await answer.json()
    (stage,) = told["warm_up"]
    assert stage["name"] == "8 x 8 tokens, LoRA"
    assert 0 <= stage["seconds"] < 1
    assert told["started"] <= told["ready_since"]
    assert told["queue"]["max_requests"] == house.engine.gate.limits.max_queue
    assert told["adapter_limits"]["max_loras"] == house.services.adapter_config.max_loras
    assert (told["restarts"], told["num_restarts"], told["store_problem"], told["redis"]) == ([], 0, None, None)


async def test_limits_that_were_changed_are_told(http: aiohttp.ClientSession, house: Any) -> None:
    async with http.put("/admin/engine", headers=ADMIN, json={"max_cpu_loras": 7}) as answer:
        assert answer.status == 200
    async with http.get(PATH, headers=ADMIN) as answer:
        assert (await answer.json())["adapter_limits"]["max_cpu_loras"] == 7


async def test_health_is_for_the_admin_alone(http: aiohttp.ClientSession) -> None:
    async with http.get(PATH) as answer:
        assert answer.status == 401


async def test_journals_that_are_away_are_told(house: Any, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    assert redis_card(house.services) is None
    services = replace(house.services, adapter_config=replace(house.services.adapter_config, redis_url="redis://x"))
    there = JournalCard(is_away=False, seconds_away=0.0, num_losses=0)
    assert redis_card(services) == RedisCard(there, there)
    monkeypatch.setattr("lora_serve.adapters.catalog.ledger.time.monotonic", lambda: 12.0)
    catalog.ledger._away_since = 2.0
    assert redis_card(services) == RedisCard(JournalCard(is_away=True, seconds_away=10.0, num_losses=0), there)


def test_restart_lasts_until_the_engine_is_warm_again() -> None:
    clock = Clock()
    history = EngineHistory(clock)
    with history.stage("a text"):
        pass
    history.ready()
    clock.now = 1010.0
    history.lost("killed by signal 9")
    assert (history.ready_since, history.stages) == (None, [])
    assert history.restarts[-1].seconds is None
    clock.now = 1012.5
    history.ready()
    clock.now = 1020.0
    history.ready()
    (restart,) = history.restarts
    assert (restart.time, restart.reason, restart.seconds) == (1010.0, "killed by signal 9", 2.5)


def test_part_that_failed_is_not_told_and_restarts_are_bounded() -> None:
    history = EngineHistory()
    with pytest.raises(ZeroDivisionError), history.stage("a part"):
        1 / 0  # noqa: B018
    assert history.stages == []
    for number in range(MAX_RESTARTS + 5):
        history.lost(str(number))
    assert [history.restarts[0].reason, len(history.restarts)] == ["5", MAX_RESTARTS]
