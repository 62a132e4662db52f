"""The tenants' page: tenants, keys shown once, limits against use, usage, and an audit log whose chain is checked."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import shlex
from typing import Any

import pytest
from PIL import Image, ImageStat
from playwright.async_api import Locator, Page, Response, expect

from lora_serve.cli import main
from lora_serve.commands.demo import adapter_folders
from lora_serve.tenancy.audit_journal import FIRST, chained
from tests.console.conftest import TENANT, Console, OpenPage, Watch, signed_in

SQL = "acme/sql"
IS_WHOLE = "box => box.scrollWidth <= box.clientWidth"


async def opened(open_page: OpenPage, console: Console, fragment: str = "", key: str = "", **options: Any) -> Page:
    return await signed_in(await open_page(console.url, f"#/tenants{fragment}", **options), key or console.admin)


def make(console: Console, name: str, **fields: Any) -> None:
    console.call("POST", "admin/tenants", {"name": name, **fields})


def names(console: Console) -> list[str]:
    return [card["name"] for card in console.call("GET", "admin/tenants?limit=1000")["data"]]


def dialog(page: Page) -> Locator:
    return page.get_by_role("dialog")


async def texts_of(place: Locator) -> list[str]:
    """The forms of an act for a terminal: curl, then the program's own."""
    await place.locator(".command summary").click()
    return await place.locator(".command pre").all_text_contents()


async def test_tenant_is_made_changed_and_deleted(console: Console, open_page: OpenPage) -> None:
    page = await opened(open_page, console)
    await page.get_by_role("button", name="Create a tenant").click()
    await dialog(page).get_by_label("Tenant", exact=True).fill("made")
    await dialog(page).get_by_label("It may use the base model itself").uncheck()
    await dialog(page).get_by_label("Requests per minute").fill("60")
    await dialog(page).get_by_label("Stored bytes").fill("2MiB")
    curl, cli = await texts_of(dialog(page))
    assert json.loads(shlex.split(curl)[-1])["quota"] == {"requests_per_minute": 60, "max_stored_bytes": "2MiB"}
    assert cli == (
        f"lora-serve tenants create made --no-base --requests-per-minute 60 --max-stored-bytes 2MiB --url {console.url}"
    )
    await dialog(page).get_by_role("button", name="Create a tenant").click()
    await expect(page.get_by_role("heading", name="made", level=1)).to_be_visible()
    card = console.call("GET", "admin/tenants/made")
    assert (card["may_use_base"], card["offload"]) == (False, True)
    assert card["quota"] == {"requests_per_minute": 60, "max_stored_bytes": 2 * 2**20}
    await page.get_by_role("button", name="Change").click()
    await dialog(page).get_by_label("Requests per minute").fill("")
    await dialog(page).get_by_label("Neighbours may compute").uncheck()
    _, cli = await texts_of(dialog(page))
    assert cli == f"lora-serve tenants set made --no-offload --requests-per-minute none --url {console.url}"
    await dialog(page).get_by_role("button", name="Save").click()
    await expect(dialog(page)).to_have_count(0)
    card = console.call("GET", "admin/tenants/made")
    assert (card["offload"], card["quota"]) == (False, {"max_stored_bytes": 2 * 2**20})
    await page.get_by_role("button", name="Delete").click()
    delete = dialog(page).get_by_role("button", name="Delete")
    await expect(delete).to_be_disabled()
    await dialog(page).get_by_role("textbox").fill("made")
    await delete.click()
    await expect(page.get_by_role("region", name="Tenants")).to_be_visible()
    assert "made" not in names(console)


async def test_refusals_stay_in_the_dialog_in_words(console: Console, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed += ["400", "409"]
    page = await opened(open_page, console)
    await page.get_by_role("button", name="Create a tenant").click()
    field = dialog(page).get_by_label("Tenant", exact=True)
    for name, words in (("<img src=x onerror=window.hacked=1>", "must match"), (TENANT, "is there already")):
        await field.fill(name)
        await field.press("Enter")
        await expect(dialog(page).get_by_role("alert")).to_contain_text(words)
    assert await page.evaluate("window.hacked") is None
    assert await dialog(page).locator("img").count() == 0


async def test_secret_is_shown_once_and_is_nowhere_afterwards(
    console: Console, open_page: OpenPage, watch: Watch
) -> None:
    page = await opened(open_page, console, f"/{TENANT}?tab=keys")
    label = "-<b>ci</b>"  # it is no option
    await page.get_by_role("button", name="Create a key").click()
    await dialog(page).get_by_label("Label").fill(label)
    await dialog(page).get_by_label("Role").select_option("tenant-admin")
    await dialog(page).get_by_label("Ends after").select_option("90d")
    _, cli = await texts_of(dialog(page))
    options = ["--role", "tenant-admin", f"--label={label}", "--expires", "90d", "--url", console.url]
    assert shlex.split(cli)[3:] == [TENANT, *options]
    await dialog(page).get_by_role("button", name="Create a key").click()
    secret = await dialog(page).locator("[data-secret]").inner_text()
    me = console.call("GET", "admin/whoami", key=secret)
    assert (me["tenant"], me["role"]) == (TENANT, "tenant-admin")
    random = secret[16:]
    assert len(random) == 43
    await dialog(page).get_by_role("button", name="I have copied it").click()
    row = page.locator(f'[data-key="{me["key_id"]}"]')
    await expect(row).to_contain_text(label)
    assert random not in await page.content()
    assert random not in json.dumps(await page.evaluate("[{...localStorage}, {...sessionStorage}, location.href]"))
    assert not [url for url in watch.urls if random in url]
    assert random not in console.process.log.read_text()
    watch.allowed.append("401")
    await row.get_by_role("button", name="Revoke").click()
    await dialog(page).get_by_role("button", name="Revoke").click()
    await expect(row).to_have_attribute("data-active", "false")
    cards = console.call("GET", f"admin/tenants/{TENANT}/keys")["data"]
    assert [card["active"] for card in cards if card["id"] == me["key_id"]] == [False]


@pytest.mark.many(2)
@pytest.mark.parametrize(
    ("fragment", "by_curl", "by_cli"),
    [
        ("", TENANT, TENANT),
        (f"/{TENANT}", '"tenant_use"', TENANT),
        (f"/{TENANT}?tab=keys", TENANT, "tenant-admin"),
        ("?tab=usage", "day,adapter,digest,", "day,adapter,digest,"),
        (f"/{TENANT}?tab=audit", TENANT, "POST /admin/tenants"),
    ],
)
async def test_forms_for_a_terminal_do_what_they_say(
    console: Console,
    open_page: OpenPage,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fragment: str,
    by_curl: str,
    by_cli: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    page = await opened(open_page, console, fragment)
    curl, cli = await texts_of(page.get_by_role("main"))
    environment = {"LORA_SERVE_KEY": console.admin, "PATH": "/usr/bin:/bin"}
    process = await asyncio.create_subprocess_exec("bash", "-c", curl, stdout=asyncio.subprocess.PIPE, env=environment)
    out, _ = await process.communicate()
    assert '"error"' not in out.decode()
    assert by_curl in out.decode()
    _, *given = shlex.split(cli)
    assert await asyncio.to_thread(main, [*given, "--url", console.url, "--admin-key", console.admin]) == 0
    assert by_cli in capsys.readouterr().out


@pytest.mark.nightly
async def test_bars_show_limits_against_their_use(console: Console, open_page: OpenPage) -> None:
    limits = {"requests_per_minute": 4, "max_adapters": 2, "max_stored_bytes": "1GiB"}
    make(console, "limited", quota=limits)
    key = console.call("POST", "admin/tenants/limited/keys", {})["secret"]
    console.call("POST", "v1/completions", {"model": "demo-base", "prompt": "a", "max_tokens": 1}, key=key)
    page = await opened(open_page, console, "/limited")

    def bar(name: str) -> Locator:
        return page.locator(f'[data-limit="{name}"]')

    await expect(bar("requests_per_minute").get_by_role("img")).to_have_attribute(
        "aria-label", "Requests per minute: 1 / 4 (25%)"
    )
    await expect(bar("max_adapters")).to_contain_text("0 / 2")
    await expect(bar("max_stored_bytes")).to_contain_text("0 B / 1 GiB")
    await expect(bar("tokens_per_minute")).to_contain_text("not counted, no limit")
    await expect(bar("device_bytes_max")).to_contain_text("0 B, no limit")
    console.call("POST", "v1/completions", {"model": "demo-base", "prompt": "a", "max_tokens": 1}, key=key)
    await page.get_by_role("button", name="Refresh").click()
    await expect(bar("requests_per_minute")).to_contain_text("2 / 4")


async def test_usage_is_a_chart_a_table_and_a_file(console: Console, open_page: OpenPage, watch: Watch) -> None:
    console.call("POST", "v1/completions", {"model": SQL, "prompt": "a", "max_tokens": 1}, key=console.inference)
    page = await opened(open_page, console, f"/{TENANT}?tab=usage")
    row = page.locator(f'[data-adapter="{SQL}"]')
    await expect(row).to_be_visible()
    await expect(page.get_by_label("Requests by day").locator("canvas")).to_be_visible()
    await expect(page.locator(".u-legend")).to_contain_text(SQL)
    box = page.get_by_role("region", name="Usage", exact=True)
    assert await box.evaluate(IS_WHOLE)
    async with page.expect_download() as downloading:
        await page.get_by_role("button", name="Download CSV").click()
    download = await downloading.value
    assert download.suggested_filename.startswith(f"usage-{TENANT}-")
    lines = list(csv.DictReader(io.StringIO((await download.path()).read_text())))
    mine = [line for line in lines if line["adapter"] == SQL]
    assert sum(int(line["requests"]) for line in mine) >= 1
    counts = await row.get_by_role("cell").all_inner_texts()
    assert int(counts[1]) == sum(int(line["requests"]) for line in mine)
    asked = [url for url in watch.urls if "format=csv" in url]
    assert asked
    assert all(console.admin not in url for url in watch.urls)


async def test_table_that_is_cut_shows_where_there_is_more(console: Console, open_page: OpenPage) -> None:
    console.call("POST", "v1/completions", {"model": SQL, "prompt": "a", "max_tokens": 1}, key=console.inference)
    page = await opened(open_page, console, f"/{TENANT}?tab=usage", viewport={"width": 360, "height": 740})
    box = page.get_by_role("region", name="Usage", exact=True)
    await expect(page.locator(f'[data-adapter="{SQL}"]')).to_be_visible()
    assert not await box.evaluate(IS_WHOLE)
    at_first = await shades(box)
    await box.evaluate("box => box.scrollTo({ left: box.scrollWidth, behavior: 'instant' })")
    at_last = await shades(box)
    assert at_first[1] < at_first[0] - 5, "it is darker where there is more"
    assert at_last[0] < at_last[1] - 5


async def shades(box: Locator) -> tuple[float, float]:
    """The mean brightness of an element at its left and at its right edge."""
    picture = Image.open(io.BytesIO(await box.screenshot())).convert("L")
    width, height = picture.size
    edges = (2, 5), (width - 5, width - 2)
    left, right = (ImageStat.Stat(picture.crop((start, 2, end, height - 2))).mean[0] for start, end in edges)
    return left, right


async def test_chain_of_the_audit_log_is_checked_in_the_browser(console: Console, open_page: OpenPage) -> None:
    page = await opened(open_page, console, "?tab=audit")
    lines = console.call("GET", "admin/audit?limit=1000")["data"]
    await expect(page.locator("[data-line]").first).to_have_attribute("data-line", lines[0]["id"])
    await page.get_by_role("button", name="Check the chain").click()
    verdict = page.locator("[data-chain]")
    await expect(verdict).to_have_attribute("data-chain", "whole")
    assert int(str(await verdict.inner_text()).split()[0]) >= len(lines)


@pytest.mark.parametrize("changed", [None, "subject", "outcome", "time", "line_digest"])
async def test_changed_line_breaks_the_chain(console: Console, open_page: OpenPage, changed: str | None) -> None:
    """Against lines that the server's own function has chained, with every kind of character."""
    lines, before = [], FIRST
    for number in range(1, 6):
        act = {"subject": 'é\u2028\x7f"\\\n\U0001f600', "outcome": 200, "action": "POST /x", "key": "k"}
        line = json.dumps({"time_ms": 1_790_000_000_123 + number, **act}, sort_keys=True)
        before = chained(before, line)
        shown = {**act, "time": (1_790_000_000_123 + number) / 1000, "line_digest": before}
        lines.append({"id": str(number), "replica": "r", "number": number, **shown})
    if changed is not None:
        lines[2][changed] = {"subject": "x", "outcome": 201, "time": 1.0, "line_digest": "0" * 64}[changed]
    page = await open_page(console.url)
    script = "lines => import(new URL('pages/tenants/chain.js', location.href)).then(chain => chain.checked(lines))"
    verdict = await page.evaluate(script, lines)
    broken = {None: [], "line_digest": [3, 4]}.get(changed, [3])
    assert [one["number"] for one in verdict["broken"]] == broken
    assert verdict["numChecked"] == 5
    part = await page.evaluate(script, [lines[0], lines[1], lines[4]])
    assert (part["numLines"], part["numChecked"], part["broken"]) == (3, 2, [])


async def test_tenants_admin_sees_its_own_tenant_alone(console: Console, open_page: OpenPage) -> None:
    make(console, "foreign-one")
    page = await opened(open_page, console, key=console.tenant_admin)
    answers: list[Response] = []
    page.on("response", lambda answer: answers.append(answer))
    await expect(page.get_by_role("heading", name=TENANT, level=1)).to_be_visible()
    for tab in ("Limits", "Keys", "Usage", "Audit log"):
        await page.get_by_role("tab", name=tab).click()
        await expect(page.get_by_role("tab", name=tab)).to_have_attribute("aria-selected", "true")
        await page.wait_for_load_state("networkidle")
        assert "foreign-one" not in await page.content()
    await expect(page.get_by_role("button", name="Change")).to_have_count(0)
    await expect(page.get_by_role("button", name="Delete")).to_have_count(0)
    await page.get_by_role("button", name="Check the chain").click()
    await expect(page.locator("[data-chain]")).to_have_attribute("data-chain", "whole")
    await page.goto(f"{console.url}/ui/#/tenants/foreign-one")
    await expect(page.get_by_role("heading", name=TENANT, level=1)).to_be_visible()
    await page.wait_for_load_state("networkidle")
    told = [await answer.text() for answer in answers if answer.request.failure is None and answer.status != 304]
    assert len([text for text in told if TENANT in text]) >= 4
    assert "foreign-one" not in "".join(told)


@pytest.mark.nightly
async def test_long_lists_are_paged(console: Console, open_page: OpenPage) -> None:
    for number in range(51):
        make(console, f"paged-{number:03d}")
    page = await opened(open_page, console)
    rows, known = page.locator("[data-tenant]"), names(console)
    await expect(rows).to_have_count(50)
    await page.get_by_role("button", name="Next").click()
    await expect(rows.first).to_have_attribute("data-tenant", known[50])
    await page.get_by_role("button", name="Previous").click()
    await expect(rows.first).to_have_attribute("data-tenant", known[0])


@pytest.mark.nightly
async def test_tables_on_a_phone_scroll_and_keep_rows_low_and_ids_whole(console: Console, open_page: OpenPage) -> None:
    """A row is one line, and so is an id of an ordinary length; a very long one takes a few, at its own width."""
    make(console, "on-a-phone", quota={"requests_per_minute": 600, "max_queued": 4, "max_stored_bytes": 2**30})
    long = "acme/" + "customer-support-of-the-northern-region-" * 3
    folder = str(adapter_folders()[SQL])
    console.call("POST", "admin/adapters", {"id": long, "source": folder})
    page = await opened(open_page, console, viewport={"width": 390, "height": 844})
    row = page.locator('[data-tenant="on-a-phone"]')
    await expect(row).to_be_visible()
    assert (await row.bounding_box() or {})["height"] < 80
    await page.goto(f"{console.url}/ui/#/adapters")
    name = page.locator(".adapter-name", has_text=long)
    await expect(name).to_be_visible()
    assert (await name.bounding_box() or {})["height"] < 100  # not the 19 lines of a column of a few letters
    assert (await page.locator(".adapter-name", has_text=SQL).first.bounding_box() or {})["height"] < 30
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
