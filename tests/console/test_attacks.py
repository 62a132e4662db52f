"""Addresses that others make up, answers that come late, a server that hangs: the key goes nowhere else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests.console.conftest import Console, OpenPage, Watch, serve, signed_in, with_keys

LEADING_ELSEWHERE = (
    "adapters/../../../other",
    "adapters/..%2F..%2F..%2Fother",
    "adapters/..%2Ftenants%2Facme",
    "adapters/acme%2F.%2F..%2F..%2Fother",
    "tenants/..",
    "tenants/.",
)
WHOAMI = "**/admin/whoami"


async def test_no_address_leads_the_key_to_another_route_or_program(
    console: Console, open_page: OpenPage, watch: Watch
) -> None:
    page = await signed_in(await open_page(console.url), console.admin)
    await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")
    before = {url.partition("?")[0] for url in watch.urls}
    for fragment in LEADING_ELSEWHERE:
        await page.evaluate("hash => { location.hash = hash }", f"#/{fragment}")
        await expect(page.get_by_role("alert")).to_contain_text("Nothing has such a name")
    asked = {url.removeprefix(console.url) for url in watch.urls if url.partition("?")[0] not in before}
    assert {url for url in asked if not url.startswith("/ui/")} <= {"/admin/whoami"}
    await page.goto(f"{console.url}/ui/#/adapters")  # a page that failed does not stay so
    await expect(page.get_by_role("row").nth(1)).to_be_visible()


async def held(page: Page, asked: asyncio.Event, go_on: asyncio.Event, answer: dict[str, Any] | None = None) -> None:
    """Lets the next look at the caller be answered only when it may go on, once."""

    async def hold(route: Route) -> None:
        response = None if answer is not None else await route.fetch()
        asked.set()
        await go_on.wait()
        await (route.fulfill(response=response) if response else route.fulfill(**(answer or {})))

    await page.route(WHOAMI, hold, times=1)


@pytest.mark.parametrize("is_refused", [False, True], ids=["answered", "refused"])
async def test_late_answer_to_an_earlier_key_changes_nothing_for_the_next(
    console: Console, open_page: OpenPage, watch: Watch, is_refused: bool
) -> None:
    watch.allowed.append("401")
    page = await signed_in(await open_page(console.url), console.tenant_admin)
    asked, go_on = asyncio.Event(), asyncio.Event()
    refusal = {"status": 401, "json": {"error": {"message": "This key is revoked."}}} if is_refused else None
    await held(page, asked, go_on, refusal)
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    await asked.wait()
    await page.get_by_role("button", name="Sign out").click()
    await signed_in(page, console.admin)
    async with page.expect_response(WHOAMI):
        go_on.set()
    await page.evaluate("new Promise((done) => setTimeout(done, 100))")  # the page has taken it
    await page.get_by_role("link", name="Playground").click()  # which shows the account anew
    account = page.locator(".side-end")
    await expect(account).to_contain_text("admin")
    await expect(account).not_to_contain_text("acme")


@pytest.mark.nightly
async def test_server_that_hangs_is_told_in_words_until_it_goes_on(
    tmp_path: Path, open_page: OpenPage, watch: Watch
) -> None:
    watch.allowed += ["ERR_", "503"]
    with serve(tmp_path, adapters=1) as process:
        await asyncio.to_thread(process.wait_until_ready, 120)
        console = await asyncio.to_thread(with_keys, process)
        page = await signed_in(await open_page(console.url, "#/live"), console.admin)
        status = page.locator(".live-status")
        await expect(status).to_have_attribute("data-status", "live")
        found = subprocess.check_output(["pgrep", "-f", "--", f"--port {process.port} "], text=True)
        pid = int(found.split()[0])
        os.kill(pid, signal.SIGSTOP)
        try:
            away = page.get_by_role("status").filter(has_text="does not answer")
            await expect(away).to_be_visible(timeout=40_000)
            await expect(status).to_have_attribute("data-status", "lost", timeout=40_000)
        finally:
            os.kill(pid, signal.SIGCONT)
        await expect(status).to_have_attribute("data-status", "live", timeout=40_000)
        await expect(away).to_be_hidden(timeout=40_000)
