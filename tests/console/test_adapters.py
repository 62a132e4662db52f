"""The Adapters page: ten thousand in a list, registered by drop, versions and canary, and every act as it is typed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, Route, expect
from safetensors.torch import load_file, save_file

from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.commands.demo import adapter_folders
from tests.catalog_versions import version
from tests.console.accessibility import violations
from tests.console.conftest import ADMIN_KEY, MAX_UPLOAD, Console, OpenPage, Watch, serve, signed_in, with_keys
from tests.many_adapters import fill

MANY = 10_000
SQL = adapter_folders()["acme/sql"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SHOWN = "[...document.querySelectorAll('[data-adapter]')].map(row => row.dataset.adapter)"
DROP = """
async ([files, isFolder]) => {
  const item = ({path, data, size}) => {
    const bytes = size ? new Uint8Array(size) : Uint8Array.from(atob(data), one => one.charCodeAt(0));
    return {path, file: new File([bytes], path.split('/').pop())};
  };
  const found = files.map(item);
  const transfer = new DataTransfer();
  for (const one of found) transfer.items.add(one.file);
  const event = new DragEvent('drop', {dataTransfer: transfer, bubbles: true, cancelable: true});
  if (isFolder) {
    const child = one => ({isDirectory: false, fullPath: '/' + one.path, file: take => take(one.file)});
    const readers = () => { let some = found.map(child); return {readEntries: take => { take(some); some = []; }}; };
    const entry = {isDirectory: true, fullPath: '/folder', createReader: readers};
    const items = [{webkitGetAsEntry: () => entry}];
    Object.defineProperty(event, 'dataTransfer', {value: {items, files: transfer.files, types: ['Files']}});
  }
  document.querySelector('main').dispatchEvent(event);
}
"""
DASH = "\N{EN DASH}"
MAX_STALL_MS = 250  # a task that draws all ids takes seconds; processor time of one of 50 rows differs threefold


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A server of its own with 10 000 ids more, records without bytes: nobody asks them anything."""
    folder = tmp_path_factory.mktemp("crowded")
    (folder / "store").mkdir()
    catalog = open_catalog(folder / "store")
    fill(catalog, MANY, version("a"))
    catalog.close()
    with serve(folder, adapters=1) as process:
        process.wait_until_ready(120)
        yield with_keys(process)


@pytest_asyncio.fixture(loop_scope="session")
async def page(console: Console, open_page: OpenPage) -> Page:
    """Signed in as the admin, on the list."""
    page = await signed_in(await open_page(console.url, "#/adapters"), ADMIN_KEY)
    await expect(page.locator("[data-adapter]").first).to_be_visible()
    return page


@asynccontextmanager
async def without_stalls(browser: Browser, page: Page) -> AsyncIterator[None]:
    """No task of the page's main thread takes too much processor time: neighbours on the machine have no part in it."""
    await browser.start_tracing(page=page, categories=["toplevel"])
    yield
    events = json.loads(await browser.stop_tracing())["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    main = [one for one in events if names.get((one["pid"], one["tid"])) == "CrRendererMain"]
    spent = [one["tdur"] / 1000 for one in main if "tdur" in one]
    assert len(spent) > 10
    assert max(spent) < MAX_STALL_MS


def files_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [
        {"path": f"{name}/{one.name}", "data": base64.b64encode(one.read_bytes()).decode()}
        for one in sorted(folder.iterdir())
    ]


def other_content(folder: Path, target: Path, *, renamed: str = "") -> Path:
    """A copy with other values; `renamed`: its tensors are of modules of such names, which the base has not."""
    target.mkdir(parents=True)
    (target / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    tensors = {name: 1.5 * tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    if renamed:
        tensors = {name.replace("_proj", renamed): tensor for name, tensor in tensors.items()}
    save_file(tensors, target / WEIGHTS)
    return target


async def drop_folder(page: Page, files: list[dict[str, Any]]) -> Locator:
    """Dropped on the page; the dialog that opens."""
    await page.evaluate(DROP, [files, True])
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_be_visible()
    return dialog


async def show(page: Page, console: Console, adapter: str) -> None:
    await page.goto(f"{console.url}/ui/#/adapters/{quote(adapter, safe='')}")
    await expect(page.get_by_role("heading", name=adapter)).to_be_visible()


def ids(console: Console, **query: Any) -> list[str]:
    text = "&".join(f"{name}={value}" for name, value in query.items())
    return [row["id"] for row in console.call("GET", f"admin/adapters?fields=summary&{text}")["data"]]


@pytest.mark.nightly
async def test_ten_thousand_are_searched_ordered_and_paged_without_a_stall(
    crowded: Console, open_page: OpenPage, browser: Browser
) -> None:
    page = await signed_in(await open_page(crowded.url, "#/adapters"), ADMIN_KEY)
    rows = page.locator("[data-adapter]")
    await expect(rows).to_have_count(50)
    await expect(page.get_by_text(f"1{DASH}50 of 10,0")).to_be_visible()
    async with without_stalls(browser, page):
        await page.get_by_role("button", name="Next").click()
        await expect(page.get_by_text(f"51{DASH}100 of 10,0")).to_be_visible()
        await page.get_by_label("Search").fill("tenant3/ 0999")
        await expect(rows).to_have_count(1)
        assert await rows.first.get_attribute("data-adapter") == "tenant3/adapter-09993"
        await page.get_by_label("Search").fill("tenant3")
        await expect(page.get_by_text(f"1{DASH}50 of 1,000")).to_be_visible()
        for head, sort in (("Size", "bytes"), ("Rank", "rank")):
            await page.get_by_role("button", name=head).click()
            await expect(page.get_by_role("columnheader", name=head)).to_have_attribute("aria-sort", "descending")
            expected = ids(crowded, sort=sort, search="tenant3", limit=50)
            await expect(rows.first).to_have_attribute("data-adapter", expected[0])
            assert await page.evaluate(SHOWN) == expected
        await page.get_by_label("State").select_option("on_device")
        await expect(page.get_by_role("heading", name="No adapter is like that")).to_be_visible()
    await page.get_by_role("navigation").get_by_role("link", name="Adapters").click()
    await expect(page.get_by_label("Search")).to_have_value("")
    await expect(page.get_by_text(f"1{DASH}50 of 10,0")).to_be_visible()


@pytest.mark.nightly
async def test_address_beyond_the_end_shows_the_last_page(console: Console, page: Page) -> None:
    await page.goto(f"{console.url}/ui/#/adapters?offset=5000")
    await expect(page.locator("[data-adapter]").first).to_be_visible()


async def test_dropped_folder_is_registered_and_every_step_of_it_is_shown(console: Console, page: Page) -> None:
    files = [*files_of(SQL, "my sql"), {"path": "my sql/notes.txt", "data": ""}]
    dialog = await drop_folder(page, files)
    await expect(dialog.get_by_text("Not sent: my sql/notes.txt")).to_be_visible()
    await expect(dialog.get_by_label("Id", exact=True)).to_have_value("my-sql")
    await dialog.get_by_label("Id", exact=True).fill("drop/good")
    command = await dialog.get_by_role("region", name="curl").inner_text()
    assert "-X PUT" in command
    assert "drop/good" in command
    await dialog.get_by_role("button", name="Register").click()
    done = page.get_by_role("dialog", name="Registered")
    await expect(done.get_by_text("drop/good is version 1.")).to_be_visible()
    await expect(done.get_by_text("The probe changed a logit by")).to_be_visible()
    await done.get_by_role("link", name="Open its page").click()
    await expect(page.get_by_role("heading", name="drop/good")).to_be_visible()
    card = console.call("GET", "admin/adapters/drop/good")
    assert card["digest"] == console.call("GET", "admin/adapters/acme/sql")["digest"]
    await expect(page.locator("[data-fact=digest]")).to_contain_text(card["digest"])


async def test_refused_folder_shows_the_cause_and_tensors(page: Page, tmp_path: Path, watch: Watch) -> None:
    watch.allowed.append("422")
    broken = other_content(SQL, tmp_path / "broken", renamed="_quux")
    dialog = await drop_folder(page, files_of(broken, "broken"))
    await dialog.get_by_label("Id", exact=True).fill("drop/broken")
    await dialog.get_by_role("button", name="Register").click()
    alert = dialog.get_by_role("alert")
    await expect(alert).to_contain_text("The adapter cannot be served")
    await expect(dialog.locator("[data-step=send]")).to_have_attribute("data-state", "done")
    await expect(dialog.locator("[data-step=examine]")).to_have_attribute("data-state", "failed")
    await expect(dialog.locator("[data-step=probe]")).to_have_attribute("data-state", "waiting")
    named = set(await alert.locator("code").all_inner_texts())
    await expect(alert).to_contain_text("none of its tensors is named as a module of this base model")
    assert len(named & set(load_file(broken / WEIGHTS))) == 3  # and how many more there are
    assert len(await alert.get_by_role("listitem").all()) >= len(named)


NO_ADAPTERS: list[tuple[str, list[str]]] = [
    ("Nothing that can be read was dropped.", []),
    ("neither a folder nor a tar", ["readme.md"]),
    ("holds no adapter_config.json", ["x", "y"]),
    ("no adapter_model.safetensors", [CONFIG, "adapter_model.bin"]),
    ("2 adapters are in there", [f"x/{CONFIG}", f"y/{CONFIG}"]),
]


async def test_what_is_no_adapter_is_told_before_anything_is_sent(page: Page) -> None:
    for words, names in NO_ADAPTERS:
        dialog = await drop_folder(page, [{"path": f"a/{name}", "data": ""} for name in names])
        await expect(dialog.get_by_role("alert")).to_contain_text(words)
        await expect(dialog.get_by_role("button", name="Register")).to_be_disabled()


@pytest.mark.nightly
async def test_upload_that_is_too_large_is_refused_in_words(page: Page, watch: Watch) -> None:
    watch.allowed.append("413")
    files = [*files_of(SQL, "huge")[:1], {"path": f"huge/{WEIGHTS}", "size": 12 * MAX_UPLOAD}]
    dialog = await drop_folder(page, files)
    await dialog.get_by_label("Id", exact=True).fill("drop/huge")
    await dialog.get_by_role("button", name="Register").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("--max-upload-size")


@pytest.mark.nightly
async def test_archive_is_chosen_and_its_upload_shows_its_progress(
    console: Console, page: Page, tmp_path: Path
) -> None:
    archive = shutil.make_archive(str(tmp_path / "sql v2"), "gztar", other_content(SQL, tmp_path / "other"))
    await page.get_by_role("button", name="Register").click()
    dialog = page.get_by_role("dialog")
    await dialog.locator("input[accept*='.zip']").set_input_files(archive)
    await expect(dialog.get_by_text("sql v2.tar.gz, ")).to_be_visible()
    await dialog.get_by_label("Id", exact=True).fill("drop/archive")
    session = await page.context.new_cdp_session(page)
    slow = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 400_000}
    await session.send("Network.enable")
    await session.send("Network.emulateNetworkConditions", slow)
    await dialog.get_by_role("button", name="Register").click()
    await expect(dialog.locator("[data-step=send]")).to_have_attribute("data-state", "running")
    bar = dialog.get_by_role("progressbar", name="Upload")
    sent, size = await bar.evaluate("bar => [bar.value, bar.max]")
    assert 0 <= sent < size == Path(archive).stat().st_size
    await session.send("Network.emulateNetworkConditions", {**slow, "uploadThroughput": -1})
    await expect(page.get_by_role("dialog", name="Registered")).to_contain_text("drop/archive is version 1.")
    assert console.call("GET", "admin/adapters/drop/archive")["source"] == "upload"


@pytest.mark.nightly
async def test_source_is_registered_and_a_wrong_one_refused_in_words(page: Page, watch: Watch) -> None:
    watch.allowed.append("400")
    await page.get_by_role("button", name="Register").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("tab", name="From a path").click()
    await dialog.get_by_label("Id", exact=True).fill("path/dates")
    await dialog.get_by_label("Source").fill("/nowhere/at/all")
    await dialog.get_by_role("button", name="Register").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("/nowhere/at/all")
    await dialog.get_by_label("Source").fill(str(adapter_folders()["chronos/dates"]))
    await expect(dialog.get_by_role("region", name="CLI")).to_contain_text("lora-serve adapters register path/dates /")
    await dialog.get_by_role("button", name="Register").click()
    await expect(page.get_by_role("dialog", name="Registered")).to_contain_text("path/dates is version 1.")


async def test_dialog_of_a_registration_that_goes_on_at_the_server_is_closed_and_not_cancelled(
    console: Console, page: Page
) -> None:
    go_on = asyncio.Event()

    async def hold(route: Route) -> None:
        await go_on.wait()
        await route.continue_()

    await page.route(
        "**/admin/adapters", lambda route: hold(route) if route.request.method == "POST" else route.continue_()
    )
    await page.get_by_role("button", name="Register").click()
    dialog = page.get_by_role("dialog")
    buttons = dialog.locator("footer button")
    await expect(buttons).to_have_text(["Cancel", "Register"])
    await dialog.get_by_role("tab", name="From a path").click()
    await dialog.get_by_label("Source").fill(str(SQL))
    await dialog.get_by_label("Id", exact=True).fill("left/alone")
    await dialog.get_by_role("button", name="Register").click()
    await expect(buttons).to_have_text(["Close", "Register"])
    await buttons.first.click()
    await expect(dialog).to_have_count(0)
    go_on.set()
    async with asyncio.timeout(60):
        while not console.call("GET", "admin/adapters?fields=summary&search=left")["total"]:
            await asyncio.sleep(0.1)


@pytest.mark.nightly
async def test_id_that_nobody_typed_follows_what_is_chosen(page: Page) -> None:
    dialog = await drop_folder(page, files_of(SQL, "one"))
    field = dialog.get_by_label("Id", exact=True)
    await expect(field).to_have_value("one")
    await drop_folder(page, files_of(SQL, "two"))
    await expect(field).to_have_value("two")
    await dialog.get_by_role("tab", name="From a path").click()
    await dialog.get_by_label("Source").fill("s3://bucket/models/three.tar.gz?versionId=7")
    await expect(field).to_have_value("three")
    await field.fill("mine")
    await drop_folder(page, files_of(SQL, "four"))
    await expect(dialog.get_by_text("four: 2 files")).to_be_visible()
    await expect(field).to_have_value("mine")


@pytest.mark.nightly
async def test_registration_is_asked_about_once_at_a_time_and_its_steps_go_forth(page: Page) -> None:
    asked, most, told = [0], [0], ["probing", "receiving", "receiving"]
    is_read, go_on = asyncio.Event(), asyncio.Event()

    async def tell(route: Route) -> None:
        asked[0] += 1
        most[0] = max(most[0], asked[0])
        if not told:  # so the page has the answers before
            is_read.set()
        await asyncio.sleep(0.5)  # slower than the page asks
        row = {"id": "drop/slow", "stage": told.pop(0) if told else "receiving", "bytes": 1, "total_bytes": 2}
        asked[0] -= 1
        await route.fulfill(json={"data": [row]})

    async def hold(route: Route) -> None:
        await go_on.wait()
        await route.continue_()

    await page.route("**/admin/registrations", tell)
    await page.route("**/admin/adapters/drop/slow", hold)
    dialog = await drop_folder(page, files_of(SQL, "slow"))
    await dialog.get_by_label("Id", exact=True).fill("drop/slow")
    await dialog.get_by_role("button", name="Register").click()
    probe = dialog.locator("[data-step=probe]")
    await expect(probe).to_have_attribute("data-state", "running")
    await is_read.wait()
    assert await probe.get_attribute("data-state") == "running"
    go_on.set()
    await expect(page.get_by_role("dialog", name="Registered")).to_contain_text("drop/slow is version 1.")
    assert most == [1]


def registered(console: Console, adapter: str, source: Path = SQL, **fields: Any) -> None:
    console.call("POST", "admin/adapters", {"id": adapter, "source": str(source), **fields})


def run_shell(console: Console, text: str) -> None:
    """As a person would type it, with the keys that the page leaves to the environment."""
    keys = {"LORA_SERVE_KEY": console.admin, "LORA_SERVE_ADMIN_KEY": console.admin}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", text], env={**os.environ, **keys, "PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert '"error"' not in done.stdout


async def confirmed(page: Page, name: str) -> None:
    """An act's dialog, its forms seen, confirmed."""
    dialog = page.get_by_role("dialog", name=name)
    await expect(dialog.get_by_role("region", name="curl")).to_contain_text("curl -sS")
    await expect(dialog.get_by_role("region", name="CLI")).to_contain_text("lora-serve adapters")
    await dialog.get_by_role("button", name=name, exact=True).click()
    await expect(dialog).to_have_count(0)


async def test_canary_takes_its_share_and_its_figures_are_those_of_the_api(
    console: Console, page: Page, tmp_path: Path
) -> None:
    registered(console, "trial/sql")
    registered(console, "trial/sql", other_content(SQL, tmp_path / "other"), activate=False)
    await show(page, console, "trial/sql")
    table = page.get_by_role("region", name="Versions side by side")
    await expect(table.get_by_role("columnheader")).to_have_count(3)
    await page.get_by_label("Version to try").select_option("2")
    await page.get_by_label("Share of the users").fill("50")
    await page.get_by_role("button", name="Set the canary").click()
    await confirmed(page, "Set the canary")
    await expect(table.locator("[data-version='2']")).to_contain_text("canary")
    assert console.call("GET", "admin/adapters/trial/sql")["route"]["canary"] == {"version": 2, "percent": 50}
    ask = {"model": "trial/sql", "prompt": "x", "max_tokens": 1}
    for user in range(8):
        console.call("POST", "v1/completions", {**ask, "user": str(user)})
    for user in range(8):
        with pytest.raises(urllib.error.HTTPError):
            console.call("POST", "v1/completions", {**ask, "max_tokens": 100, "timeout_ms": 1, "user": str(user)})
    sides = console.call("GET", "admin/adapters/trial/sql")["route"]["answers"]
    assert (sum(side["requests"] for side in sides), sum(side["errors"] for side in sides)) == (16, 8)
    for one in sides:
        side = page.locator(f"[data-side='{one['version']}']")
        await expect(side).to_contain_text(re.compile(rf"^\s*{one['requests']} answer"))
    await expect(page.locator("[data-side='2'] .bad")).to_contain_text("%")
    await page.get_by_role("button", name="Roll back").click()
    await confirmed(page, "Roll back")
    await expect(page.get_by_text("All users get the active version.")).to_be_visible()
    await page.get_by_role("button", name="Activate v2").click()
    await confirmed(page, "Activate")
    await expect(table.locator("[data-version='2']")).to_contain_text("active")
    assert console.call("GET", "admin/adapters/trial/sql")["version"] == 2


async def test_shown_commands_do_what_their_buttons_do(console: Console, page: Page) -> None:
    registered(console, "typed/sql")
    await show(page, console, "typed/sql")
    for verb, form, is_pinned in (("Pin", "curl", True), ("Unpin", "CLI", False)):
        await page.get_by_role("button", name=verb, exact=True).click()
        dialog = page.get_by_role("dialog", name=verb)
        text = await dialog.get_by_role("region", name=form).inner_text()
        assert ADMIN_KEY not in text
        await asyncio.to_thread(run_shell, console, text)
        assert console.call("GET", "admin/adapters/typed/sql")["pinned"] is is_pinned
        await dialog.get_by_role("button", name="Cancel").click()
    await page.get_by_role("button", name="Prefetch").click()
    await confirmed(page, "Prefetch")
    await expect(page.locator("[data-fact=state]")).to_have_text("on the device")
    await page.get_by_role("button", name="Evict").click()
    await confirmed(page, "Evict")
    await expect(page.locator("[data-fact=state]")).to_have_text("stored")


@pytest.mark.nightly
async def test_commands_of_a_registration_are_true_too(console: Console, page: Page, tmp_path: Path) -> None:
    metadata = {"team": "it's ours; and, yours"}
    for form, folder in (("curl", 'my "sql", new; all'), ("CLI", '-my"sql",new;all')):
        shutil.copytree(SQL, tmp_path / folder)
        dialog = await drop_folder(page, files_of(SQL, folder))
        await dialog.get_by_label("Metadata").fill(json.dumps(metadata))
        name = f"typed/{form.lower()}"
        await dialog.get_by_label("Id", exact=True).fill(name)
        text = await dialog.get_by_role("region", name=form).inner_text()
        await asyncio.to_thread(run_shell, console, f"cd {shlex.quote(str(tmp_path))} && {text}")
        assert console.call("GET", f"admin/adapters/{name}")["metadata"] == metadata


@pytest.mark.nightly
async def test_alias_and_sharing(console: Console, page: Page) -> None:
    registered(console, "named/sql")
    await show(page, console, "named/sql")
    await page.get_by_label("New alias").fill("named/live")
    await page.get_by_label("It means").fill("named/sql@1")
    await page.get_by_role("button", name="Add the alias").click()
    await confirmed(page, "Add the alias")
    await expect(page.locator("[data-alias='named/live']")).to_be_visible()
    await expect(page.locator("[data-fact=last_used]")).to_have_text("not since start")  # of more nothing is known
    await page.get_by_label("Tenants, with commas").fill("acme")
    await page.get_by_role("button", name="Change sharing").click()
    await confirmed(page, "Change sharing")
    await expect(page.locator("[data-fact=shared_with]")).to_have_text("acme")
    await page.get_by_role("button", name="Delete alias named/live").click()
    await confirmed(page, "Delete alias named/live")
    await expect(page.get_by_text("No aliases.")).to_be_visible()
    assert console.call("GET", "admin/adapters/named/sql")["shared_with"] == ["acme"]


@pytest.mark.nightly
async def test_metadata_is_changed_and_a_wrong_default_refused_in_words(
    console: Console, page: Page, watch: Watch
) -> None:
    watch.allowed.append("400")
    registered(console, "described/sql", metadata={"team": "ours"})
    await show(page, console, "described/sql")
    field, change = page.get_by_label("Metadata (JSON)"), page.get_by_role("button", name="Change metadata")
    await expect(field).to_have_value('{\n  "team": "ours"\n}')
    await expect(change).to_be_disabled()
    await field.fill("[1]")
    await expect(page.get_by_text("This is no JSON object.")).to_be_visible()
    await expect(change).to_be_disabled()
    await field.fill('{"sampling": {"temperature": "hot"}}')
    await change.click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Change metadata").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("temperature")
    await dialog.get_by_role("button", name="Cancel").click()
    await field.fill('{"team": "it\'s theirs"}')
    await change.click()
    text = await dialog.get_by_role("region", name="curl").inner_text()
    await asyncio.to_thread(run_shell, console, text)
    assert console.call("GET", "admin/adapters/described/sql")["metadata"] == {"team": "it's theirs"}
    await dialog.get_by_role("button", name="Change metadata").click()
    await expect(page.locator("[data-fact=metadata]")).to_contain_text("theirs")
    await expect(change).to_be_disabled()


@pytest.mark.nightly
async def test_whole_numbers_that_a_browser_rounds_are_not_written_back(console: Console, page: Page) -> None:
    registered(console, "exact/sql", metadata={"big": 12345678901234567890, "team": "ours"})
    await show(page, console, "exact/sql")
    await expect(page.get_by_text("whose last digits this page would lose")).to_be_visible()
    await page.get_by_label("Metadata (JSON)").fill('{"team": "theirs"}')
    await expect(page.get_by_role("button", name="Change metadata")).to_be_disabled()


@pytest.mark.nightly
async def test_blank_metadata_is_none(page: Page) -> None:
    await page.get_by_role("button", name="Register").first.click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("tab", name="From a path").click()
    await dialog.get_by_label("Source").fill("/some/folder")
    await dialog.get_by_label("Metadata").fill(" ")
    await expect(dialog.get_by_role("button", name="Register")).to_be_enabled()
    assert "metadata" not in await dialog.get_by_role("region", name="curl").inner_text()


async def test_deletion_asks_for_the_name_and_goes_back_to_the_list(console: Console, page: Page) -> None:
    registered(console, "gone/sql")
    await show(page, console, "gone/sql")
    await page.get_by_role("button", name="Delete", exact=True).click()
    dialog = page.get_by_role("dialog", name="Delete")
    act = dialog.get_by_role("button", name="Delete", exact=True)
    await expect(act).to_be_disabled()
    await dialog.get_by_label("Type gone/sql to confirm").fill("gone/sq")
    await expect(act).to_be_disabled()
    await dialog.get_by_label("Type gone/sql to confirm").fill("gone/sql")
    await act.click()
    await expect(page.locator("[data-adapter]").first).to_be_visible()
    assert ids(console, search="gone/sql") == []


PAYLOAD = "<img src=x onerror='window.pwned=1'>"


async def test_text_of_others_is_text(console: Console, page: Page, tmp_path: Path, watch: Watch) -> None:
    watch.allowed += ["404", "422"]
    registered(console, "hostile/sql", metadata={PAYLOAD: PAYLOAD})
    await show(page, console, "hostile/sql")
    await expect(page.locator("[data-fact=metadata]")).to_contain_text(PAYLOAD)
    await page.goto(f"{console.url}/ui/#/adapters/{quote(PAYLOAD, safe='')}")
    await expect(page.get_by_role("heading", name=PAYLOAD)).to_be_visible()
    await expect(page.get_by_role("alert")).to_contain_text(PAYLOAD)
    await page.goto(f"{console.url}/ui/#/adapters?search={quote(PAYLOAD, safe='')}")
    await expect(page.get_by_label("Search")).to_have_value(PAYLOAD)
    broken = other_content(SQL, tmp_path / "broken", renamed=PAYLOAD)
    files = [{**one, "path": f"{PAYLOAD}/{one['path']}"} for one in files_of(broken, "a")]
    dialog = await drop_folder(page, files)
    await expect(dialog.get_by_text(PAYLOAD).first).to_be_visible()
    await dialog.get_by_label("Id", exact=True).fill("hostile/broken")
    await dialog.get_by_role("button", name="Register").click()
    await expect(dialog.get_by_role("alert")).to_contain_text("onerror")
    assert await page.evaluate("[window.pwned, document.querySelectorAll('main img, dialog img').length]") == [None, 0]


async def test_tenant_admin_sees_its_own_and_may_do_no_more_than_its_role(
    console: Console, open_page: OpenPage
) -> None:
    page = await open_page(console.url, "#/adapters")
    bodies: list[Any] = []
    page.on("response", lambda answer: bodies.append(answer) if "/admin/" in answer.url else None)
    await signed_in(page, console.tenant_admin)
    await expect(page.locator("[data-adapter='acme/sql']")).to_be_visible()
    await page.locator("[data-adapter='acme/sql']").get_by_role("button").click()
    await expect(page.get_by_role("button", name="Delete", exact=True)).to_be_visible()
    for name in ("Prefetch", "Evict", "Change sharing", "Add the alias"):
        await expect(page.get_by_role("button", name=name)).to_have_count(0)
    seen = await page.content() + "".join([await one.text() for one in bodies])
    assert "acme/sql" in seen
    assert not re.search(r"tenant\d|chronos|lumen", seen)


@pytest.mark.nightly
async def test_dialog_of_a_registration_fits_a_phone(console: Console, open_page: OpenPage) -> None:
    page = await open_page(console.url, "#/adapters", viewport={"width": 360, "height": 740})
    await signed_in(page, ADMIN_KEY)
    await expect(page.get_by_role("heading", name="Adapters")).to_be_visible()  # the list may still be on its way
    await drop_folder(page, files_of(SQL, "sql"))
    width = "Math.max(...[...document.querySelectorAll('html, dialog')].map(one => one.scrollWidth))"
    assert await page.evaluate(width) <= 360


@pytest.mark.nightly
async def test_dialogs_shut_nobody_out(console: Console, page: Page) -> None:
    """The pages under them are in test_shell.py."""
    await show(page, console, "acme/sql")
    await page.get_by_role("button", name="Delete", exact=True).click()
    assert await violations(page) == []
    await page.get_by_role("button", name="Cancel").click()
    dialog = await drop_folder(page, files_of(SQL, "sql"))
    await expect(dialog.get_by_role("region", name="curl")).to_be_visible()
    assert await violations(page) == []
