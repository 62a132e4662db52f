"""The live page before a real server under load: it shows what GET /admin/engine says, to those who may see it."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import ADMIN_KEY, TENANT, Console, OpenPage, Watch, serve, signed_in, with_keys
from tests.console.made_up_engine import MadeUpEngine
from tests.console.made_up_server import application

ADAPTERS = ["acme/sql", "chronos/dates", "harbor/extract", "lumen/support", "mirror/reverse", "pulse/sentiment"]
ADAPTERS += ["relay/routing", "tidewater/pirate"]
LONGEST = 440  # tokens; the demo's model knows 512
# Every byte that the page reads is kept, as nothing else sees a stream that does not end.
KEEP_WHAT_IS_READ = """
window.wasRead = "";
const plain = window.fetch;
window.fetch = async (...given) => {
  const response = await plain(...given);
  if (!response.body) return response;
  const [own, other] = response.body.tee();
  (async () => {
    const reader = other.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) window.wasRead += part.value;
  })().catch(() => {});
  return new Response(own, { status: response.status, headers: response.headers });
};
"""
LANES = """lanes => lanes.map((lane) => ({
  id: lane.dataset.request, adapter: lane.dataset.adapter, digest: lane.dataset.digest,
  colour: getComputedStyle(lane.querySelector(".live-swatch")).color,
}))"""
# The commonest colour of what is painted in the middle of each lane, of its newest part.
PAINTED = """() => {
  const canvas = document.querySelector(".live-canvas canvas");
  const context = canvas.getContext("2d");
  const ratio = canvas.width / canvas.clientWidth;
  const top = canvas.getBoundingClientRect().top;
  return [...document.querySelectorAll(".live-name")].map((lane) => {
    const box = lane.getBoundingClientRect();
    const y = Math.round((box.top - top + box.height / 2) * ratio);
    const pixels = context.getImageData(canvas.width * 0.9, y, canvas.width * 0.1 - 4, 1).data;
    const counts = {};
    for (let at = 0; at < pixels.length; at += 4) {
      const name = `rgb(${pixels[at]}, ${pixels[at + 1]}, ${pixels[at + 2]})`;
      if (pixels[at + 3] > 250) counts[name] = (counts[name] ?? 0) + 1;
    }
    return Object.entries(counts).sort((one, other) => other[1] - one[1])[0]?.[0] ?? null;
  });
}"""
# Both, once 16 rows run and most of their lanes have been painted; others have just begun.
SHOWN = f"""() => {{
  const lanes = [...document.querySelectorAll('.live-name[data-state="running"]')];
  const painted = ({PAINTED})();
  const isWhole = lanes.length === 16 && painted.length === 16 && painted.filter(Boolean).length >= 12;
  return isWhole && [({LANES})(lanes), painted];
}}"""

# How many different pictures there are in 1.5 s, and the most motes on their way at once.
PICTURES = """async () => {
  const canvas = document.querySelector(".live-canvas canvas");
  const seen = new Set();
  let motes = 0;
  for (const end = performance.now() + 1500; performance.now() < end; ) {
    seen.add(canvas.toDataURL());
    motes = Math.max(motes, document.querySelectorAll(".live-mote").length);
    await new Promise((wake) => setTimeout(wake, 40));
  }
  return [seen.size, motes];
}"""
IS_HIDDEN = """(isHidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => isHidden });
  const plain = window.setTimeout;
  window.setTimeout = (act, ms, ...given) => plain(act, Math.min(ms, 300), ...given); // half a minute is soon over
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@asynccontextmanager
async def load(url: str, adapters: Sequence[str], rows: int) -> AsyncIterator[None]:
    """So many requests that run at any time, the adapters in turn."""

    async def ask(http: aiohttp.ClientSession, adapter: str) -> None:
        body = {"model": adapter, "prompt": "Once upon a time", "max_tokens": LONGEST, "ignore_eos": True}
        while True:
            async with http.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as http:
        tasks = [asyncio.create_task(ask(http, adapters[at % len(adapters)])) for at in range(rows)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(ended, asyncio.CancelledError):
                    raise AssertionError(f"a request failed: {ended!r}")


async def live_page(open_page: OpenPage, console: Console, key: str, **options: Any) -> Page:
    page = await signed_in(await open_page(console.url, **options), key)
    await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")
    return page


async def test_16_rows_of_8_adapters_have_the_lanes_colours_and_slots_of_the_engine(
    console: Console, open_page: OpenPage
) -> None:
    async with load(console.url, ADAPTERS, 16):
        page = await live_page(open_page, console, console.admin)
        end = time.monotonic() + 20
        near = [False] * 16
        while sum(near) < len(near) - 2 and time.monotonic() < end:
            shown = await page.wait_for_function(SHOWN)  # lanes and colours of one moment
            lanes, painted = await shown.json_value()
            # A few requests may have followed others meanwhile: the lane is repainted a moment later.
            near = [is_near(one, lane["colour"]) for one, lane in zip(painted, lanes, strict=True) if one]
        slots = await page.locator(".live-slot[data-digest]").evaluate_all(LANES)
        engine = await asyncio.to_thread(console.call, "GET", "admin/engine")
        before = await page.evaluate("document.querySelector('.live-canvas canvas').toDataURL()")
        await page.wait_for_function(
            "before => document.querySelector('.live-canvas canvas').toDataURL() !== before", arg=before
        )
    digests = {card["id"]: card["digest"] for card in console.call("GET", "v1/models")["data"]}
    assert {lane["adapter"] for lane in lanes} == set(ADAPTERS)
    assert {lane["adapter"]: lane["digest"] for lane in lanes} == {name: digests[name] for name in ADAPTERS}
    in_slots = {(slot["name"], slot["digest"]) for slot in engine["slots"]}
    assert {(slot["adapter"], slot["digest"]) for slot in slots} == in_slots
    colours = {slot["digest"]: slot["colour"] for slot in slots}
    assert [lane["colour"] for lane in lanes] == [colours[lane["digest"]] for lane in lanes]
    assert len({colours[digests[name]] for name in ADAPTERS}) == len(ADAPTERS)
    assert sum(near) >= len(near) - 2


def is_near(painted: str, colour: str) -> bool:
    """The same colour, but for what a canvas rounds."""
    one, other = (list(map(float, re.findall(r"[\d.]+", text)))[:3] for text in (painted, colour))
    return all(abs(a - b) <= 3 for a, b in zip(one, other, strict=True))


@pytest.mark.nightly
async def test_a_moment_is_paused_chosen_and_left_by_pointer_and_keys(console: Console, open_page: OpenPage) -> None:
    async with load(console.url, ADAPTERS, 8):
        page = await live_page(open_page, console, console.admin)
        await expect(page.locator('.live-name[data-state="running"]')).to_have_count(8)
        await page.wait_for_timeout(600)  # some steps
        await page.get_by_role("button", name="Pause").click()
        await expect(page.locator(".live-status")).to_have_attribute("data-status", "paused")
    lane = page.locator(".live-name").nth(3)
    canvas = page.locator(".live-canvas")
    place, box = await lane.bounding_box(), await canvas.bounding_box()
    assert place
    assert box
    await canvas.click(position={"x": box["width"] - 12, "y": place["y"] + place["height"] / 2 - box["y"]})
    panel = page.get_by_role("complementary", name="Moment")
    request = panel.get_by_role("region", name="Request")
    for attribute in ("data-request", "data-digest"):
        wanted = await lane.get_attribute(attribute)
        await expect(request).to_have_attribute(attribute, wanted or "")
    await expect(request).to_contain_text(await lane.get_attribute("data-adapter") or "")
    await expect(request.locator(".live-digest")).to_have_text(await lane.get_attribute("data-digest") or "")
    rows = await panel.locator("[data-tokens]").evaluate_all("rows => rows.map((row) => row.dataset.request)")
    await expect(page.locator("[data-figure=running] .figure-number")).to_have_text(str(len(rows)))
    by_tenant = await page.locator(".live-queue [data-tenant] .live-queue-words").all_inner_texts()
    assert sum(int(words.split("+")[0]) for words in by_tenant) == len(rows)
    assert await lane.get_attribute("data-request") in rows
    number = await step_number(panel)
    await canvas.focus()
    await page.keyboard.press("ArrowLeft")
    await expect(panel.locator("[data-step]")).to_have_attribute("data-step", str(number - 1))
    await page.keyboard.press("ArrowUp")
    above = await page.locator(".live-name").nth(2).get_attribute("data-request")
    await expect(request).to_have_attribute("data-request", above or "")
    await page.keyboard.press("Escape")
    await expect(panel).to_have_count(0)
    await page.get_by_role("slider", name="Moment in the last two minutes").fill("-10")
    await expect(page.locator(".live-status")).to_have_attribute("data-status", "paused")
    await page.get_by_role("button", name="Go live").click()
    await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")


async def step_number(panel: Any) -> int:
    return int(await panel.locator("[data-step]").get_attribute("data-step"))


async def test_a_tenant_admin_sees_no_foreign_name_in_the_page_or_on_the_wire(
    console: Console, open_page: OpenPage
) -> None:
    async with load(console.url, ADAPTERS, 8):
        page = await signed_in(await open_page(console.url, before=KEEP_WHAT_IS_READ), console.tenant_admin)
        await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")
        asked = asyncio.create_task(asyncio.to_thread(ask_as_tenant, console))
        await expect(page.locator(".live-legend [data-adapter='acme/sql']")).to_be_visible()
        await asked
        await expect(page.get_by_text("Requests of acme only")).to_be_visible()
        shown, read = await page.evaluate("[document.documentElement.outerHTML, window.wasRead]")
    assert "event: frame" in read
    assert "acme/sql" in read
    foreign = {name for name in ADAPTERS if not name.startswith(f"{TENANT}/")}
    foreign |= {name.partition("/")[0] for name in foreign}
    engine = await asyncio.to_thread(console.call, "GET", "admin/engine")
    foreign |= {slot["digest"] for slot in engine["slots"] if not slot["name"].startswith(f"{TENANT}/")}
    assert len(foreign) > 14
    assert [name for name in foreign if name in shown or name in read] == []


def ask_as_tenant(console: Console) -> None:
    body = {"model": "acme/sql", "prompt": "Once", "max_tokens": 60, "ignore_eos": True}
    console.call("POST", "v1/completions", body, console.inference)


@pytest.mark.nightly
async def test_an_idle_server_says_what_to_do(console: Console, open_page: OpenPage) -> None:
    page = await live_page(open_page, console, console.tenant_admin)
    await expect(page.get_by_role("heading", name="Nothing runs yet")).to_be_visible()
    command = await page.locator(".live-empty code").first.inner_text()
    assert command.startswith(f"curl {console.url}/v1/chat/completions")
    assert console.tenant_admin not in command


@asynccontextmanager
async def made_up(frame: Callable[[float], dict[str, Any]], port: int = 0) -> AsyncIterator[int]:
    """A server of made-up frames; its port."""
    runner = web.AppRunner(application(frame), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.nightly
async def test_a_server_that_starts_again_is_found_again_and_said_to_be(open_page: OpenPage, watch: Watch) -> None:
    watch.allowed.append("ERR_")
    first, again = (MadeUpEngine(ADAPTERS, now=time.time() - 1) for _ in range(2))
    async with made_up(first.frame) as port:
        page = await signed_in(await open_page(f"http://127.0.0.1:{port}"), "any")
        await expect(page.locator(".live-name").first).to_be_visible()
    await expect(page.locator(".live-status")).to_have_attribute("data-status", "lost")
    await expect(page.get_by_text("Trying again")).to_be_visible()  # said once
    async with made_up(again.frame, port):
        await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")
        await expect(page.get_by_text("The server was started again")).to_be_visible()


async def test_steps_that_were_left_out_are_said_to_be(open_page: OpenPage, watch: Watch) -> None:
    watch.allowed.append("ERR_")
    engine = MadeUpEngine(ADAPTERS, now=time.time() - 1)

    def with_holes(now: float) -> dict[str, Any]:
        frame = engine.frame(now)
        return frame | {"steps": frame["steps"][:3] + frame["steps"][8:]}

    async with made_up(with_holes) as port:
        page = await signed_in(await open_page(f"http://127.0.0.1:{port}"), "any")
        await expect(page.locator("[data-missing]")).to_contain_text("steps were left out")


@pytest.mark.nightly
async def test_nothing_is_hard_to_see_or_reach_on_a_phone(open_page: OpenPage, watch: Watch) -> None:
    watch.allowed.append("ERR_")
    async with made_up(MadeUpEngine(ADAPTERS, now=time.time() - 3).frame) as port:
        phone = {"width": 360, "height": 780}
        page = await signed_in(await open_page(f"http://127.0.0.1:{port}", viewport=phone), "any")
        await page.locator(".live-name").first.click()
        await expect(page.get_by_role("complementary", name="Moment")).to_be_visible()
        assert await violations(page) == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.nightly
async def test_legend_is_whole_on_a_phone_and_slots_have_versions_and_all_names(
    open_page: OpenPage, watch: Watch
) -> None:
    watch.allowed.append("ERR_")
    engine = MadeUpEngine([f"{name}-with-a-name-that-is-long" for name in [*ADAPTERS, "one/x", "two/x"]], seed=3)
    engine.now = time.time() - 4

    def shared(now: float) -> dict[str, Any]:
        frame = engine.frame(now)
        return frame | {"slots": [slot | {"version": 3, "also": ["other/name"]} for slot in frame["slots"]]}

    async with made_up(shared) as port:
        url = f"http://127.0.0.1:{port}"
        page = await signed_in(await open_page(url, viewport={"width": 360, "height": 780}), "any")
        legend = page.get_by_role("list", name="Adapters in sight")
        await expect(legend.locator("[data-adapter]")).to_have_count(8)
        await legend.get_by_role("button", name="more").click()
        assert await legend.locator("[data-adapter]").count() > 8
        assert await legend.evaluate(
            "one => [one.scrollHeight - one.clientHeight, one.scrollWidth - one.clientWidth]"
        ) == [0, 0]
        slot = page.locator(".live-slot").first
        await expect(slot.locator(".live-adapter")).to_contain_text("@3, other/name")


@pytest.mark.nightly
async def test_where_motion_is_not_wanted_pictures_come_once_a_second(open_page: OpenPage, watch: Watch) -> None:
    watch.allowed.append("ERR_")
    async with made_up(MadeUpEngine(ADAPTERS, now=time.time() - 1).frame) as port:
        page = await signed_in(await open_page(f"http://127.0.0.1:{port}", reduced_motion="reduce"), "any")
        await expect(page.locator(".live-name").first).to_be_visible()
        pictures, motes = await page.evaluate(PICTURES)
        assert 1 <= pictures <= 3
        assert motes == 0


@pytest.mark.nightly
async def test_a_page_out_of_sight_costs_the_server_nothing_after_a_while(open_page: OpenPage, watch: Watch) -> None:
    watch.allowed.append("ERR_")
    asked: list[float] = []
    engine = MadeUpEngine(ADAPTERS, now=time.time() - 1)
    async with made_up(lambda now: asked.append(now) or engine.frame(now)) as port:  # type: ignore[func-returns-value]
        page = await open_page(f"http://127.0.0.1:{port}")
        await signed_in(page, "any")
        await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")
        await page.evaluate(IS_HIDDEN, True)
        await expect(page.locator(".live-status")).to_have_attribute("data-status", "asleep")
        await asyncio.sleep(0.5)
        num_asked = len(asked)
        await asyncio.sleep(0.5)
        assert len(asked) == num_asked
        await page.evaluate(IS_HIDDEN, False)
        await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")


@pytest.mark.nightly  # a server of its own, twice
async def test_a_real_server_that_starts_again_is_found_again(
    open_page: OpenPage, watch: Watch, tmp_path: Path
) -> None:
    watch.allowed += ["ERR_", "503"]
    with serve(tmp_path, adapters=2) as process:
        await asyncio.to_thread(process.wait_until_ready, 120)
        console = with_keys(process)
        page = await live_page(open_page, console, console.admin)
        port = process.port
    await expect(page.locator(".live-status")).to_have_attribute("data-status", "lost")
    with serve(tmp_path, port=port, adapters=2) as process:
        await asyncio.to_thread(process.wait_until_ready, 120)
        await expect(page.locator(".live-status")).to_have_attribute("data-status", "live")
        await expect(page.get_by_text(re.compile("Connected again|started again"))).to_be_visible()


def test_the_stream_of_made_up_frames_has_the_fields_of_the_real_one(console: Console) -> None:
    """The seam of the tests above: a made-up frame has no field that a real one lacks."""
    asked = urllib.request.Request(
        f"{console.url}/admin/engine/stream", headers={"Authorization": f"Bearer {ADMIN_KEY}"}
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        lines = (line.decode() for line in answer)
        said = [
            json.loads(line.removeprefix("data: "))
            for line, _ in zip(lines, range(6), strict=False)
            if line.startswith("data:")
        ]
    made = MadeUpEngine(ADAPTERS, now=0.0).frame(1.0)
    assert set(said[0]) >= {"model", "scope", "targets", "rate", "engine", "max_num_seqs", "version", "started"}
    assert set(made) <= set(said[1])
