"""A real Chromium before a server that asks for no key: its own answer to what other sites' pages may do."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from playwright.async_api import Browser, Route, async_playwright

from lora_serve.core.config import ServerConfig

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The browser's own guard, which not every browser has, would hide what the server does: Chromium asks its user before
# a page may reach this machine.
FLAGS = (
    "--no-sandbox",
    "--host-resolver-rules=MAP evil.test 127.0.0.1",
    "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
)
# What a page tries, each with a prompt of its own name, and what its script is told: a status, or that it failed.
ATTACK = """
async url => {
    const said = {}
    const body = name => JSON.stringify({prompt: name, max_tokens: 1})
    const attempt = async (name, path, options) => {
        try { const a = await fetch(url + path, options); said[name] = a.type == 'opaque' ? 'opaque' : a.status }
        catch { said[name] = 'failed' }
    }
    const post = (name, options) => attempt(name, '/v1/completions', {method: 'POST', body: body(name), ...options})
    await post('plain', {})
    await post('opaque', {mode: 'no-cors'})
    await post('untyped', {mode: 'no-cors', body: new Blob([body('untyped')])})
    await post('json', {headers: {'Content-Type': 'application/json'}})
    await attempt('models', '/v1/models', {})
    await attempt('metrics', '/metrics', {})
    const shown = (tag, path) => new Promise(done => {
        const element = document.createElement(tag)
        element.onload = () => done('loaded'); element.onerror = () => done('failed')
        element.src = url + path; document.body.append(element)
    })
    said.script = await shown('script', '/v1/models')
    said.image = await shown('img', '/metrics')
    said.frame = await new Promise(done => {
        const frame = document.createElement('iframe'), form = document.createElement('form')
        frame.name = 'sent'; form.target = 'sent'; form.method = 'post'; form.enctype = 'text/plain'
        form.action = url + '/v1/completions'
        const field = document.createElement('input')
        field.name = '{"prompt": "form", "max_tokens": 1, "x": "'; field.value = '"}'
        form.append(field); document.body.append(frame, form)
        frame.onload = () => { try { done(frame.contentDocument.body.innerText) } catch { done('closed') } }
        form.submit()
    })
    return said
}
"""
PAGE = "<!DOCTYPE html><title>A page</title><body></body>"
NOTHING = dict.fromkeys(("plain", "opaque", "untyped", "json", "models", "metrics", "script", "image"), "failed")
NOTHING |= {"frame": "closed"}


@pytest.fixture
async def site() -> AsyncIterator[int]:
    """The port of a server of pages."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest.fixture
def server_config(server_config: ServerConfig, site: int) -> ServerConfig:
    """One of the site's two names may."""
    return replace(server_config, allowed_origins=(f"http://localhost:{site}",))


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        assert CHROMIUM, "no Chromium is installed: apt-get install chromium"
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        await started.close()


async def attack(browser: Browser, page_url: str, url: str) -> dict[str, Any]:
    """What the scripts of a page at `page_url` learn from the server at `url`."""
    page = await browser.new_page()
    if page_url == url:  # its name meant another machine when the page was loaded
        await page.route("**/*", _give_page)
    await page.goto(page_url + "/")
    await page.unroute_all()  # a page with routes is asked about no preflight
    learnt = await page.evaluate(ATTACK, url)
    await page.close()
    return dict(learnt)


async def _give_page(route: Route) -> None:
    await route.fulfill(body=PAGE, content_type="text/html")


async def test_pages_execute_and_read_nothing_unless_their_origin_is_named(
    house: Any, site: int, browser: Browser
) -> None:
    port = house.url.rpartition(":")[2]
    cases = {
        "foreign": (f"http://127.0.0.1:{site}", house.url),
        "another name": (f"http://evil.test:{site}", f"http://localhost:{port}"),
        "rebound": (f"http://evil.test:{port}", f"http://evil.test:{port}"),
        "named": (f"http://localhost:{site}", house.url),
    }
    found: dict[str, Any] = {}
    async with asyncio.timeout(50):
        for name, (page_url, url) in cases.items():
            house.engine.requests.clear()
            learnt = await attack(browser, page_url, url)
            found[name] = learnt, [house.services.text.decode(r.prompt_token_ids) for r in house.engine.requests]
    refused = dict.fromkeys(("plain", "opaque", "untyped", "json", "models", "metrics"), 403)
    readable = {"plain": 415, "json": 200, "models": 200, "metrics": 200}  # where it asked whether it may
    assert found == {
        "foreign": (NOTHING, []),
        "another name": (NOTHING, []),
        "rebound": (NOTHING | refused, []),
        "named": (NOTHING | readable, ["json"]),
    }
