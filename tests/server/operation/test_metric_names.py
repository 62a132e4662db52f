"""Who reads names of tenants and adapters in /metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lora_serve.core.config import ServerConfig
from lora_serve.server.operation.metrics import names_note
from tests.mock_engine import MockReply

KEY = "admin-key-of-the-tests"
ADMIN = {"Authorization": f"Bearer {KEY}"}
WRONG = {"Authorization": "Bearer of-something-else"}


@pytest.fixture(params=["auto", "open", "admin"])
def metrics_names(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server_config(server_config: ServerConfig, metrics_names: str) -> ServerConfig:
    return replace(server_config, metrics_names=metrics_names)


@pytest.fixture(params=[False, True], ids=["auth-off", "auth-on"])
def auth_required(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_log_says_at_start_that_routers_need_a_key(house: Any, metrics_names: str, auth_required: bool) -> None:
    note = names_note(house.services)
    is_open = metrics_names == "open" or (metrics_names == "auto" and not auth_required)
    assert (note is None) == is_open
    assert note is None or "--role metrics" in note


async def text_of(http: aiohttp.ClientSession, headers: dict[str, str] | None = None) -> str:
    async with http.get("/metrics", headers=headers) as answer:
        assert answer.status == 200
        return await answer.text()


def figures(text: str) -> dict[str, float]:
    """Sums by sample name, but for what the clock moves."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(("vllm:lora_requests_info", "process_", "lora_serve_event_loop_lag_seconds")):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


async def test_names_are_for_whom_the_setting_says_and_the_sums_for_all(
    http: aiohttp.ClientSession, house: Any, metrics_names: str, auth_required: bool
) -> None:
    await house.register("acme/secret-project")
    gate = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    body = {"prompt": "x", "max_tokens": 2, "model": "acme/secret-project"}
    tasks = [asyncio.create_task(http.post("/v1/completions", json=body, headers=ADMIN))]
    async with asyncio.timeout(60):
        while not house.engine.requests:
            await asyncio.sleep(0.005)
    everybody, admin, wrong = await text_of(http), await text_of(http, ADMIN), await text_of(http, WRONG)
    gate.set()
    for answer in await asyncio.gather(*tasks):
        assert answer.status == 200
    tenant = "admin" if auth_required else "default"
    is_open = metrics_names == "open" or (metrics_names == "auto" and not auth_required)
    for text, is_named in ((everybody, is_open), (wrong, is_open), (admin, True)):
        assert ("acme/secret-project" in text) is is_named
        assert (f'tenant="{tenant}"' in text) is is_named
    assert figures(everybody) == figures(admin)
    assert figures(everybody)["lora_serve_tenant_requests_total"] == 1
