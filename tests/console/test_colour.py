"""Colours of adapters: a function of their content, the same all over the page and after a reload."""

from __future__ import annotations

import hashlib

from aiohttp.test_utils import TestServer

from tests.console.conftest import OpenPage
from tests.console.made_up_engine import MadeUpEngine
from tests.console.made_up_server import application

COLOURS = """async (digests) => {
    const { colourOf, resolved } = await import("./lib/colour.js");
    return { shown: digests.map((one) => resolved(colourOf(one))), base: [null, "", "base"].map(colourOf) };
}"""
DIGESTS = ["sha256:" + hashlib.sha256(str(number).encode()).hexdigest() for number in range(40)]


async def test_adapter_keeps_its_colour_whoever_came_before_and_after_a_reload(open_page: OpenPage) -> None:
    async with TestServer(application(MadeUpEngine(["acme/sql"]).frame)) as server:
        page = await open_page(str(server.make_url("/")).rstrip("/"))
        found = await page.evaluate(COLOURS, DIGESTS)
        await page.reload()
        later = await page.evaluate(COLOURS, DIGESTS[::-1])
    assert later["shown"] == found["shown"][::-1]
    assert len(set(found["shown"])) >= 30  # of 108
    assert set(found["base"]) == {"var(--base-model)"}
