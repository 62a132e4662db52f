"""Colours of adapters: apart from one another, and the same all over the page."""

from __future__ import annotations

import colorsys
import hashlib
import re

from aiohttp.test_utils import TestServer

from tests.console.conftest import OpenPage
from tests.console.made_up_engine import MadeUpEngine
from tests.console.made_up_server import application

COLOURS = """async (digests) => {
    const { colourOf, resolved } = await import("./lib/colour.js");
    const once = digests.map(colourOf);
    return { once, again: digests.map(colourOf), shown: once.map(resolved), base: [null, "", "base"].map(colourOf) };
}"""
NUM_HUES, NUM_COLOURS = 12, 36
DIGESTS = ["sha256:" + hashlib.sha256(str(number).encode()).hexdigest() for number in range(NUM_COLOURS + 4)]


async def test_adapters_that_are_met_have_colours_of_their_own_and_keep_them(open_page: OpenPage) -> None:
    async with TestServer(application(MadeUpEngine(["acme/sql"]).frame)) as server:
        page = await open_page(str(server.make_url("/")).rstrip("/"))
        found = await page.evaluate(COLOURS, DIGESTS)
    assert found["again"] == found["once"]
    assert len(set(found["shown"][:NUM_COLOURS])) == NUM_COLOURS
    assert set(found["shown"][NUM_COLOURS:]) <= set(found["shown"][:NUM_COLOURS])
    hues = sorted(hue_of(colour) for colour in found["shown"][:NUM_HUES])
    gaps = [later - earlier for earlier, later in zip(hues, [*hues[1:], hues[0] + 360], strict=True)]
    assert min(gaps) >= 20  # degrees
    assert set(found["base"]) == {"var(--base-model)"}


def hue_of(colour: str) -> float:
    red, green, blue = (float(part) / 255 for part in re.findall(r"[\d.]+", colour))
    return 360 * colorsys.rgb_to_hls(red, green, blue)[0]
