"""The page "Engine": limits that change at once with what they do, and how the engine came up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import ADMIN_KEY, Console, OpenPage, Watch, serve, signed_in
from tests.e2e.processes import engine_of
from tests.redis_server import RedisServer


async def at_engine(console: Console, open_page: OpenPage) -> Page:
    page = await signed_in(await open_page(console.url, "#/engine"), console.admin)
    await expect(page.get_by_role("heading", name="Limits")).to_be_visible()
    return page


async def test_limit_is_changed_with_its_learned_effect_and_its_curl(console: Console, open_page: OpenPage) -> None:
    page = await at_engine(console, open_page)
    rows, apply = page.get_by_label("Rows of a step"), page.get_by_role("button", name="Apply")
    await expect(apply).to_be_disabled()
    before = await rows.input_value()
    await rows.fill("3")
    await expect(page.get_by_text("Learned: 3 rows")).to_be_visible()
    curl = page.get_by_role("region", name="curl")
    await expect(curl).to_contain_text('{"max_num_seqs":3}')
    await expect(curl).to_contain_text("$LORA_SERVE_KEY")
    assert console.admin not in await page.content()
    await apply.click()
    await expect(page.get_by_text("The new limits are in force.")).to_be_visible()
    engine = await asyncio.to_thread(console.call, "GET", "admin/engine")
    assert engine["batcher"]["max_num_seqs"] == 3
    await rows.fill(before)
    async with page.expect_response(lambda answer: answer.request.method == "PUT"):
        await apply.click()
    engine = await asyncio.to_thread(console.call, "GET", "admin/engine")
    assert str(engine["batcher"]["max_num_seqs"]) == before


@pytest.mark.nightly
async def test_targets_are_turned_on_and_off_and_the_controller_says_why(console: Console, open_page: OpenPage) -> None:
    page = await at_engine(console, open_page)
    target, apply = page.get_by_label("Target between tokens"), page.get_by_role("button", name="Apply")
    await target.fill("75")
    await apply.click()
    controller = page.get_by_role("region", name="Latency controller").first
    await expect(page.locator("[data-reason]")).to_contain_text("75 ms")
    await expect(controller).to_be_visible()
    await target.fill("")
    async with page.expect_response(lambda answer: answer.request.method == "PUT"):
        await apply.click()
    await expect(page.locator("[data-reason]")).to_contain_text("no target is set")
    engine = await asyncio.to_thread(console.call, "GET", "admin/engine")
    assert engine["batcher"]["inter_token_target_ms"] is None


async def test_wrong_limits_are_told_beside_their_fields_and_by_the_server(
    console: Console, open_page: OpenPage, watch: Watch
) -> None:
    page = await at_engine(console, open_page)
    rows, apply = page.get_by_label("Rows of a step"), page.get_by_role("button", name="Apply")
    for text in ("", "many", "-1", "1.5"):
        await rows.fill(text)
        await expect(rows).to_have_attribute("aria-invalid", "true")
        await expect(apply).to_be_disabled()
    await page.get_by_label("Bytes of host memory").fill("2 elephants")
    await expect(page.get_by_text("Enter bytes, such as")).to_be_visible()
    await page.get_by_role("button", name="Undo").click()
    watch.allowed.append("status of 400")
    await rows.fill("5000000")
    await apply.click()
    await expect(page.get_by_role("alert")).to_contain_text("max_num_seqs")
    await expect(page.get_by_role("alert")).to_contain_text("Request ")


async def test_warm_up_cost_and_store_are_those_of_the_server(console: Console, open_page: OpenPage) -> None:
    page = await at_engine(console, open_page)
    health = await asyncio.to_thread(console.call, "GET", "admin/engine/health")
    assert len(health["warm_up"]) >= 5
    for stage in health["warm_up"]:
        await expect(page.get_by_text(stage["name"], exact=True)).to_be_visible()
    engine = await asyncio.to_thread(console.call, "GET", "admin/engine")
    await expect(page.locator("[data-cost]")).to_have_count(len(engine["batcher"]["step_cost_us"]))
    await expect(page.locator("[data-state=ready]")).to_be_visible()
    await expect(page.locator("[data-store]")).to_have_text("takes changes")
    await expect(page.get_by_text("none since the server began")).to_be_visible()


@pytest.mark.nightly
async def test_restarts_and_a_redis_that_is_away_are_told_while_they_last(
    tmp_path: Path, open_page: OpenPage, watch: Watch
) -> None:
    watch.allowed.append("status of 503")  # while no engine is there
    redis = RedisServer(tmp_path)
    await asyncio.to_thread(redis.start)
    flags = ("--engine", "process", "--redis-url", redis.url)
    with serve(tmp_path, *flags, adapters=1) as process:
        await asyncio.to_thread(process.wait_until_ready, 120)
        page = await signed_in(await open_page(process.url), ADMIN_KEY)
        await page.get_by_role("link", name="Engine").click()
        registry, tenants = (page.locator(f"[data-redis={name}]") for name in ("registry", "tenants"))
        await expect(registry).to_have_text("there")
        await expect(page.get_by_text("Adapters in Redis")).to_be_visible()
        await asyncio.to_thread(redis.kill)
        await expect(registry).to_contain_text("away for", timeout=30_000)
        await expect(tenants).to_contain_text("away for", timeout=30_000)
        await asyncio.to_thread(redis.start)
        await expect(registry).to_contain_text("there", timeout=30_000)
        os.kill(await asyncio.to_thread(engine_of, process.pid), signal.SIGKILL)
        restarts = page.get_by_role("table", name="Restarts")
        await expect(restarts.get_by_role("row")).to_have_count(2, timeout=60_000)  # and the head
        await expect(restarts).not_to_contain_text("not yet", timeout=60_000)
        await expect(restarts).to_contain_text("SIGKILL")
        await expect(page.locator("[data-state=ready]")).to_be_visible(timeout=60_000)
        await page.close()
    await asyncio.to_thread(redis.kill)
