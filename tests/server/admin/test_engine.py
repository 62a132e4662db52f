"""PUT /admin/engine, and the figures of every tier on cards, in /admin/engine and in /metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import ValidationError

from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.errors import ConflictError
from lora_serve.core.messages import Resize, Tune
from lora_serve.core.setting_types import YEAR
from lora_serve.core.settings import Settings
from lora_serve.server.admin.protocol import LimitFields
from lora_serve.server.app import build_app
from tests.server.conftest import ADMIN


async def put(admin: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with admin.put("/admin/engine", json=body) as answer:
        return answer.status, await answer.json()


async def test_new_limits_reach_the_engine_and_its_figures_come_back(admin: aiohttp.ClientSession, house: Any) -> None:
    status, body = await put(admin, {"max_loras": 32, "adapter_memory": "512MiB", "adapter_host_memory": 10**9})
    assert status == 200
    assert house.engine.commands == [Resize(32, 512 * 2**20, 10**9)]
    assert body["max_loras"] == 32
    async with admin.get("/admin/engine") as answer:
        assert (await answer.json())["max_loras"] == 32


COUNTS = (0, 1, 15, 16, 4096, 4097, 2**14, 2**14 + 1, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**50, 2**50 + 1)
TIMES = (0.0005, 0.001, 60_000.0, 60_000.5, 1000.0 * YEAR, 1001.0 * YEAR)


def test_limits_are_bounded_as_the_flags_are() -> None:
    """What a server was started with can be set again, and what is set can be its flag."""
    for name in LimitFields.model_fields:
        for value in (*COUNTS, *(TIMES if name.endswith("_ms") else ())):
            if value == 0 and (name in Tune.MAY_BE_OFF or name in ("adapter_memory", "adapter_host_memory")):
                continue  # "no target" here, "no adapters" there
            is_flag = is_valid(Settings, {"model": "m", name: value})
            assert is_valid(LimitFields, {name: value}) == is_flag, (name, value)


def is_valid(schema: Callable[..., object], values: dict[str, Any]) -> bool:
    try:
        schema(**values)
    except ValidationError as error:
        return not any(problem["loc"] for problem in error.errors())  # fields that do not fit each other
    return True


@pytest.mark.many(8)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"max_loras": 0}, "max_loras"),
        ({"max_loras": True}, "max_loras"),
        ({"max_loras": "7"}, "max_loras"),
        ({"max_loras": 10**9}, "max_loras"),
        ({"adapter_memory": "much"}, "adapter_memory"),
        ({"adapter_memory": "9" * 400}, "adapter_memory"),
        ({"adapter_memory": -1}, "adapter_memory"),
        ({"adapter_host_memory": 0}, "adapter_host_memory"),
        ({"max_cpu_loras": 1.5}, "max_cpu_loras"),
        ({"max_cpu_loras": 2**64}, "max_cpu_loras"),  # could not be told to an engine in another process
        ({"max_loras": None}, None),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 2.0}, "max_num_seqs"),
        ({"max_num_seqs": 65}, "max_num_seqs"),  # more than tokens
        ({"max_num_seqs": 33, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": "512"}, "max_num_batched_tokens"),
        ({"batch_wait_ms": -1}, "batch_wait_ms"),
        ({"batch_wait_ms": 60_001}, "batch_wait_ms"),
        ({"batch_wait_ms": True}, "batch_wait_ms"),
        ({"preferred_batch_size": -1}, "preferred_batch_size"),
        ({"latency_target_ms": "fast"}, "latency_target_ms"),
        ({"inter_token_target_ms": [50]}, "inter_token_target_ms"),
        ({"max_loras": 2, "speculate": "off"}, "speculate"),  # it cannot be changed
        ({"max_loras": 2, "max_num_seqs": 65}, "max_num_seqs"),  # nothing of it is done
    ],
)
async def test_limits_that_are_none_are_refused(
    admin: aiohttp.ClientSession, house: Any, body: dict[str, Any], param: str | None
) -> None:
    status, answer = await put(admin, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert house.engine.commands == []


async def test_the_batcher_is_tuned_and_its_limits_come_back_under_the_same_names(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    body = {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "batch_wait_ms": 2.5, "preferred_batch_size": 3,
        "latency_target_ms": 250, "inter_token_target_ms": 40.5,
    }  # fmt: skip
    status, answer = await put(admin, body)
    assert status == 200
    assert house.engine.commands == [Tune(4, 32, 2.5, 3, 250.0, 40.5)]
    assert {name: answer["batcher"][name] for name in body} == body
    assert answer["batcher"]["in_force"] == {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "batch_wait_ms": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize("off", [None, 0])
async def test_targets_are_turned_off_by_null_or_0_and_kept_if_left_out(
    admin: aiohttp.ClientSession, off: int | None
) -> None:
    names = ("preferred_batch_size", "latency_target_ms", "inter_token_target_ms")
    await put(admin, dict.fromkeys(names, 7))
    for index, name in enumerate(names):
        status, answer = await put(admin, {name: off})
        assert status == 200
        assert [answer["batcher"][other] for other in names] == [None] * (index + 1) + [7] * (2 - index)


async def test_null_leaves_a_limit_that_cannot_be_off_as_it_is(admin: aiohttp.ClientSession, house: Any) -> None:
    status, answer = await put(admin, {"max_num_seqs": None, "batch_wait_ms": 3})
    assert (status, answer["batcher"]["max_num_seqs"], answer["batcher"]["batch_wait_ms"]) == (200, 8, 3)
    assert house.engine.commands == [Tune(batch_wait_ms=3.0)]


async def test_tiers_and_batcher_are_changed_by_one_call(admin: aiohttp.ClientSession, house: Any) -> None:
    assert (await put(admin, {"max_loras": 3, "max_num_seqs": 2}))[0] == 200
    assert house.engine.commands == [Resize(3), Tune(2)]


async def test_admin_key_is_needed(http: aiohttp.ClientSession, house: Any) -> None:
    async with http.put("/admin/engine", json={"max_loras": 2}) as answer:
        assert answer.status == 401
    assert house.engine.commands == []


async def test_what_the_engine_refuses_is_said_and_changes_no_limit(admin: aiohttp.ClientSession, house: Any) -> None:
    house.engine.command_error = ConflictError("unpin some first")
    assert (await put(admin, {"max_loras": 1}))[0] == 409
    config = house.services.adapter_config
    assert house.services.limits.of(config) == config


async def test_sets_of_adapters_are_held_to_the_live_limits(
    admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any
) -> None:
    for seed, name in enumerate(["a", "b"]):
        await house.register(name, seed=seed)
    request = {"prompt": [1, 2], "max_tokens": 1, "adapters": [{"id": "a"}, {"id": "b"}]}
    for max_loras, status in ((1, 400), (2, 200)):
        assert (await put(admin, {"max_loras": max_loras}))[0] == 200
        async with http.post("/v1/completions", json=request) as answer:
            assert answer.status == status


async def test_registration_is_held_to_the_live_host_memory(admin: aiohttp.ClientSession, house: Any) -> None:
    await put(admin, {"adapter_host_memory": 10})
    folder = house.make_adapter("big")
    async with admin.post("/admin/adapters", json={"id": "big", "source": str(folder)}) as answer:
        assert answer.status == 422
        assert "--adapter-host-memory allows 10" in await answer.text()
    await put(admin, {"adapter_host_memory": "1MiB"})
    async with admin.post("/admin/adapters", json={"id": "big", "source": str(folder)}) as answer:
        assert answer.status == 201


@pytest.fixture
async def with_figures(house: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A second door to the same house, which knows its store."""
    services = replace(house.services, store=DiskStore(house.store, 10**6))
    runner = web.AppRunner(build_app(services), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}", headers=ADMIN) as session:
        yield session
    await runner.cleanup()


async def test_disk_tier_is_shown_beside_the_engines(with_figures: aiohttp.ClientSession, house: Any) -> None:
    await house.register("a")
    async with with_figures.get("/admin/engine") as answer:
        disk = (await answer.json())["tiers"]["disk"]
    assert (disk["num_items"], disk["budget_bytes"]) == (1, 10**6)
    assert disk["num_bytes"] > 100
    async with with_figures.get("/metrics") as answer:
        text = await answer.text()
    assert f'lora_serve_adapter_bytes{{tier="disk"}} {float(disk["num_bytes"])}' in text
    assert 'lora_serve_adapter_evictions_total{reason="corrupt",tier="disk"} 0.0' in text


async def test_card_says_why_an_adapter_left_and_where_it_is(with_figures: aiohttp.ClientSession, house: Any) -> None:
    await house.register("a")
    async with with_figures.get("/admin/adapters/a") as answer:
        card = await answer.json()
    assert card["tiers"] == ["disk"]
    assert (card["evictions"], card["eviction_reasons"], card["last_eviction"]) == (0, {}, None)
