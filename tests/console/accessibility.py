"""axe-core, as the wheel axe-playwright-python brings it, in a page that lets no script in but its own."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from playwright.async_api import Page

SERIOUS = ("serious", "critical")
_RUN = "rules => axe.run(document, {resultTypes: ['violations'], ...(rules && {runOnly: rules})})"
_FADED = "Promise.allSettled(document.getAnimations().filter(one => one.transitionProperty).map(one => one.finished))"
_FEWEST_RULES = 10  # that found something to look at
_OF_COLOURS = ["color-contrast", "link-in-text-block"]


async def violations(page: Page, impacts: tuple[str, ...] = SERIOUS) -> list[str]:
    """Rule and element of each violation that counts, as the page is shown now in light colours; then, by the rules
    that look at colours, in dark ones.
    """
    await page.emulate_media(color_scheme="light")
    found = await _run(page, None)
    assert len(found["passes"]) > _FEWEST_RULES
    await page.emulate_media(color_scheme="dark")
    await page.evaluate(_FADED)
    dark = await _run(page, _OF_COLOURS)
    assert dark["passes"], "there was text to look at"
    await page.emulate_media(color_scheme="light")
    return [
        f"{one['id']} ({one['impact']}, {scheme}): {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for scheme, result in (("light", found), ("dark", dark))
        for one in result["violations"]
        if one["impact"] in impacts
        for node in one["nodes"]
    ]


async def _run(page: Page, rules: list[str] | None) -> dict[str, Any]:
    source = (files("axe_playwright_python") / "axe.min.js").read_text()
    if not await page.evaluate("typeof axe === 'object'"):
        await page.evaluate(f"{source}\n;undefined")  # by the debugger's protocol, beside the page's policy
    result: dict[str, Any] = await page.evaluate(_RUN, rules)
    return result
