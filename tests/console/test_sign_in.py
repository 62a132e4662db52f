"""Sign-in: each role sees its pages, each failure has its words, and the key stays in the page's memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import ADMIN_KEY, Console, OpenPage, Watch, serve, signed_in, with_keys

ALL = ["Live", "Adapters", "Playground", "Tenants", "Engine"]
REFUSED = "the server responded with a status of"  # Chromium logs every refusal
AWAY = "net::ERR_"


async def try_key(page: Page, key: str) -> None:
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Sign in").click()


@pytest.mark.parametrize(
    ("role", "pages"), [("admin", ALL), ("tenant_admin", ALL[:4]), ("inference", ["Playground"])], ids=str
)
async def test_each_role_sees_its_pages_alone(
    console: Console, open_page: OpenPage, role: str, pages: list[str]
) -> None:
    page = await signed_in(await open_page(console.url), getattr(console, role))
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    await expect(links).to_have_text(pages)
    await expect(links.first).to_have_attribute("aria-current", "page")
    for name in [one.lower() for one in ALL if one not in pages]:
        await page.goto(f"{console.url}/ui/#/{name}")
        await expect(page.get_by_text("There is no such page.")).to_be_visible()


async def test_what_is_no_key_is_refused_in_words_and_asked_of_nobody(
    console: Console, open_page: OpenPage, watch: Watch
) -> None:
    page = await open_page(console.url)
    for key, words in (("", "Enter a key."), ("two words", "printable ASCII"), ("schlüssel", "printable ASCII")):
        await try_key(page, key)
        await expect(page.get_by_label("Key", exact=True)).to_have_attribute("aria-invalid", "true")
        await expect(page.get_by_text(words)).to_be_visible()
    assert not any("whoami" in url for url in watch.urls)


async def test_wrong_key_is_refused_in_words(console: Console, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed.append(f"{REFUSED} 401")
    page = await open_page(console.url)
    await try_key(page, "ls-wrong")
    await expect(page.locator(".field-error")).to_contain_text("API key")
    await expect(page.get_by_role("button", name="Sign out")).to_have_count(0)
    await signed_in(page, console.inference)


async def test_key_for_metrics_alone_opens_no_page(console: Console, open_page: OpenPage) -> None:
    key = await asyncio.to_thread(
        console.call, "POST", "admin/tenants/acme/keys", {"name": "metrics", "role": "metrics"}
    )
    page = await signed_in(await open_page(console.url), key["secret"])
    await expect(page.get_by_text("for /metrics only")).to_be_visible()


@pytest.mark.parametrize("is_kept", [False, True])
async def test_key_is_in_memory_or_in_this_tabs_storage_and_nowhere_else(
    console: Console, open_page: OpenPage, watch: Watch, is_kept: bool
) -> None:
    page = await open_page(console.url)
    if is_kept:
        await page.get_by_label("Keep it until this tab closes").check()
    await signed_in(page, console.tenant_admin)
    for name in ("Adapters", "Playground", "Live"):
        await page.get_by_role("link", name=name).click()
    kept = await page.evaluate("JSON.stringify([sessionStorage, localStorage, document.cookie, location.href])")
    session, *others = json.loads(kept)
    assert (console.tenant_admin in json.dumps(session)) is is_kept
    assert console.tenant_admin not in json.dumps(others)
    assert await page.context.cookies() == []
    assert not any(console.tenant_admin in url for url in watch.urls)
    assert console.tenant_admin not in await page.content()
    await page.reload()
    left = page.get_by_role("button", name="Sign out" if is_kept else "Sign in")
    await expect(left).to_be_visible()
    if is_kept:
        await left.click()
        assert await page.evaluate("sessionStorage.length") == 0
    assert console.tenant_admin not in console.process.log.read_text()


async def test_revoked_key_signs_out_in_words(console: Console, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed.append(f"{REFUSED} 401")
    key = await asyncio.to_thread(
        console.call, "POST", "admin/tenants/acme/keys", {"name": "x", "role": "tenant-admin"}
    )
    page = await signed_in(await open_page(console.url), key["secret"])
    await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")
    await asyncio.to_thread(console.call, "DELETE", f"admin/tenants/acme/keys/{key['id']}")
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()  # by itself, within seconds
    await expect(page.get_by_role("status").filter(has_text="revoked")).to_be_visible()
    await expect(page.get_by_role("navigation").get_by_role("link")).to_have_count(0)
    assert await page.locator(".live").count() == 0


async def test_kept_key_that_ended_meanwhile_is_told_in_words(
    console: Console, open_page: OpenPage, watch: Watch
) -> None:
    watch.allowed.append(f"{REFUSED} 401")
    page = await open_page(console.url)
    await page.evaluate("sessionStorage.setItem('lora_serve.key:/', 'ls-of-another-server')")
    await page.reload()
    await expect(page.get_by_role("status").filter(has_text="API key")).to_be_visible()
    assert await page.evaluate("sessionStorage.length") == 0


@pytest.mark.nightly
async def test_too_many_wrong_keys_and_a_server_that_goes_and_comes(
    tmp_path: Path, open_page: OpenPage, watch: Watch
) -> None:
    watch.allowed += [REFUSED, AWAY]
    flags = ("--wrong-keys-per-minute", "2")
    with serve(tmp_path, *flags, adapters=0) as process:
        await asyncio.to_thread(process.wait_until_ready, 120)
        console = await asyncio.to_thread(with_keys, process)
        page = await open_page(console.url)
        for number in range(3):
            await try_key(page, f"ls-wrong-{number}")
            await expect(page.get_by_role("button", name="Sign in")).to_be_enabled()
        await expect(page.get_by_text("Too many wrong keys")).to_be_visible()
        await signed_in(page, ADMIN_KEY)  # a right one is taken even so
    lost = page.get_by_role("status").filter(has_text="does not answer")
    await expect(lost).to_be_visible()
    with serve(tmp_path, adapters=0, port=process.port) as process:
        await expect(page.get_by_role("status").filter(has_text="answers again")).to_be_visible(timeout=60_000)
        await expect(page.get_by_role("button", name="Sign out")).to_be_visible()  # the key is the same
        await page.get_by_role("button", name="Sign out").click()
    await try_key(page, ADMIN_KEY)
    await expect(page.locator(".field-error")).to_contain_text("not reached")
