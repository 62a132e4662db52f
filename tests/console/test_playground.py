"""The playground: one prompt to several columns, what they answer and why, and what of it may be kept or shared."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.conftest import Console, OpenPage, Watch, call, serve, signed_in

QUESTION = "Hello, my friend. How much is the Orbit?"
SUPPORT, PIRATE, SQL, TOOLS = "lumen/support", "tidewater/pirate", "acme/sql", "summit/tools"
TOOL_FILE = Path("lora_serve/demo_data/tools.json")
MARKUP = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
LONG = {"type": "array", "items": {"type": "integer"}, "minItems": 300}  # of some hundred tokens


def play(*columns: dict[str, Any], prompt: str = QUESTION, **fields: Any) -> str:
    """Settings as the page takes them from a text."""
    sampling = {"temperature": "0", "max_tokens": "48"}
    made = [{"sampling": sampling, **column} for column in columns]
    return json.dumps({"mode": "chat", "prompt": prompt, "columns": made, **fields})


async def opened(open_page: OpenPage, console: Console, *columns: dict[str, Any], key: str = "", **fields: Any) -> Page:
    """The playground with these columns, by the key of the admin if no other is given."""
    page = await signed_in(await open_page(console.url, "#/playground"), key or console.admin)
    await load(page, play(*columns, **fields))
    return page


async def load(page: Page, text: str) -> None:
    await page.get_by_role("button", name="Settings as text").click()
    await page.get_by_role("textbox", name="Settings").fill(text)
    await page.get_by_role("button", name="Use these settings").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)


async def run(page: Page) -> None:
    await page.get_by_role("button", name="Run", exact=True).click()


def column(page: Page, number: int) -> Locator:
    return page.get_by_role("region", name=f"Column {number}")


async def answer_of(page: Page, number: int, state: str = "done") -> str:
    """The answer of a column, once it has come to an end."""
    await expect(column(page, number).locator(".outcome")).to_have_attribute("data-state", state)
    tokens = column(page, number).locator(".answer-tokens .token")
    return "".join(await tokens.evaluate_all("all => all.map(one => one.textContent)"))


def asked(console: Console, **fields: Any) -> Any:
    """The first choice of the API's own answer."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 48, **fields}
    return console.call("POST", "v1/chat/completions", body)["choices"][0]


def composed(*scales: float) -> dict[str, Any]:
    ids = (SUPPORT, PIRATE)
    return {"adapters": [{"id": name, "scale": scale} for name, scale in zip(ids, scales, strict=True)]}


async def test_three_columns_answer_as_the_api_does_and_say_who_answered(console: Console, open_page: OpenPage) -> None:
    columns = [
        {"model": "demo-base"},
        {"model": SUPPORT},
        {"kind": "composition", "members": composed(1, 1)["adapters"]},
    ]
    page = await opened(open_page, console, *columns)
    await page.get_by_role("textbox", name="Prompt").press("Control+Enter")
    answers = [await answer_of(page, number) for number in (1, 2, 3)]
    wanted = [asked(console, model="demo-base"), asked(console, model=SUPPORT), asked(console, **composed(1, 1))]
    assert answers == [choice["message"]["content"] for choice in wanted]
    assert len(set(answers)) == 3
    digests = {card["id"]: card["digest"] for card in console.call("GET", "v1/models")["data"]}
    for name in (SUPPORT, PIRATE):
        await expect(column(page, 3).locator(f'[data-adapter="{name}"]')).to_have_attribute(
            "data-digest", digests[name]
        )
    await expect(column(page, 2).locator(".by")).to_contain_text(f"{SUPPORT}@1")
    for number in (1, 2, 3):
        request = column(page, number).locator(".request-id")
        assert len(await request.inner_text()) == 32
        assert await request.evaluate("one => one.scrollWidth <= one.clientWidth")  # whole, in one line


async def test_times_are_the_servers_but_for_decoding(console: Console, open_page: OpenPage) -> None:
    page = await opened(open_page, console, {"model": SUPPORT})
    async with page.expect_response("**/v1/chat/completions") as answering:
        await run(page)
    await answer_of(page, 1)
    told = (await (await answering.value).all_headers())["server-timing"]
    assert [part.split(";")[0] for part in told.split(", ")] == ["queue", "load", "prefill"]
    bar = column(page, 1).get_by_role("img")
    words = str(await bar.get_attribute("aria-label"))
    assert [part.split()[0] for part in words.split(", ")] == ["Queue", "Load", "Prefill", "Decode"]
    assert words.count("measured here") == 1
    assert words.endswith("(measured here)")
    figures = column(page, 1).locator("[data-figure]")
    first, speed, tokens = await figures.all_inner_texts()
    assert first.endswith("ms")
    assert speed == "\N{EN DASH} tokens/s" or float(speed.split()[0].replace(",", "")) > 0  # all in one read, or not
    answer = console.call(
        "POST", "v1/chat/completions",
        {"model": SUPPORT, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 48},
    )  # fmt: skip
    assert int(tokens) == answer["usage"]["completion_tokens"]


@pytest.mark.nightly
async def test_tokens_show_their_alternatives_on_hover_and_by_keyboard(console: Console, open_page: OpenPage) -> None:
    page = await opened(open_page, console, {"model": "demo-base"})
    await run(page)
    text = await answer_of(page, 1)
    entries = asked(console, model="demo-base", logprobs=True, top_logprobs=5)["logprobs"]["content"]
    tokens, tip = column(page, 1).locator("[data-at]"), column(page, 1).get_by_role("tooltip")
    spelled = await tokens.all_text_contents()
    assert "".join(spelled) == text
    at = next(at for at, entry in enumerate(entries) if entry["logprob"] < -0.2)
    await expect(tip).to_be_hidden()
    await tokens.nth(at).hover()
    await expect(tip.get_by_role("listitem")).to_have_count(5)
    for number, other in enumerate(entries[at]["top_logprobs"]):
        item = tip.get_by_role("listitem").nth(number)
        await expect(item).to_contain_text(json.dumps(other["token"], ensure_ascii=False))
        await expect(item).to_contain_text(f"({other['logprob']:.2f})")
    assert int(str(await tokens.nth(at).get_attribute("data-level"))) > 0
    await page.mouse.move(0, 0)
    await expect(tip).to_be_hidden()
    await tokens.first.focus()
    await page.keyboard.press("ArrowRight")
    await expect(tokens.nth(1)).to_be_focused()
    await expect(tip).to_contain_text(json.dumps(spelled[1]))
    await page.keyboard.press("Escape")
    await expect(tip).to_be_hidden()


@pytest.mark.nightly
async def test_scales_change_the_answer(console: Console, open_page: OpenPage) -> None:
    page = await opened(open_page, console, {"kind": "composition", "members": composed(1, 1)["adapters"]})
    await run(page)
    first = await answer_of(page, 1)
    member = column(page, 1).get_by_role("group", name="Adapter 2 of the sum")
    await member.get_by_role("slider", name="Scale").fill("0.5")
    await expect(member.get_by_role("spinbutton", name="Scale as a number")).to_have_value("0.5")
    await run(page)
    second = await answer_of(page, 1)
    assert second != first
    assert second == asked(console, **composed(1, 0.5))["message"]["content"]
    await expect(column(page, 1).locator(f'[data-adapter="{PIRATE}"]')).to_contain_text(re.compile(r"\b0\.5$"))


@pytest.mark.nightly
async def test_each_column_tells_its_own_error_in_words(console: Console, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed += ["404", "400"]
    columns = [
        {"model": SUPPORT, "version": "1"},
        {"model": SUPPORT, "version": "9"},
        {"model": SUPPORT, "sampling": {"temperature": "warm"}},
        {"model": SUPPORT, "schema": "{"},
        {"model": SUPPORT, "sampling": {"temperature": "3"}},
        {"kind": "composition"},
    ]
    page = await opened(open_page, console, *columns)
    await run(page)
    for number, words in ((2, f"{SUPPORT}@9"), (3, "Temperature is no number"), (4, "JSON schema: this is no JSON")):
        await expect(column(page, number).get_by_role("alert")).to_contain_text(words)
    await expect(column(page, 5).get_by_role("alert")).to_contain_text("temperature")
    await expect(column(page, 6).get_by_role("alert")).to_contain_text("Add an adapter")
    await expect(column(page, 2).get_by_role("alert")).to_contain_text("Request ")
    assert await answer_of(page, 1) == asked(console, model=SUPPORT)["message"]["content"]
    await expect(column(page, 1).get_by_role("alert")).to_have_count(0)


@pytest.mark.nightly
async def test_schema_holds_an_answer_and_tools_are_called(console: Console, open_page: OpenPage) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"const": MARKUP}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    held = {"model": "demo-base", "schema": json.dumps(schema), "sampling": {"max_tokens": "200"}}
    columns = [held, {"model": TOOLS, "tools": TOOL_FILE.read_text()}]
    page = await opened(open_page, console, *columns, prompt="What is the weather in Oslo?")
    await run(page)
    assert json.loads(await answer_of(page, 1)) == {"ok": MARKUP}
    await answer_of(page, 2)
    called = column(page, 2).locator("[data-call]")
    await expect(called).to_have_attribute("data-call", "get_weather")
    assert json.loads(await called.locator("code").inner_text()) == {"city": "Oslo"}
    assert await page.evaluate("window.hacked") is None
    assert await page.locator(".columns img, .columns script").count() == 0


async def test_markup_is_text_wherever_it_comes_from(console: Console, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed.append("404")
    page = await opened(open_page, console, {"model": MARKUP}, {"model": "demo-base"}, prompt=MARKUP, system=MARKUP)
    await run(page)
    await answer_of(page, 2)
    await expect(column(page, 1).get_by_role("alert")).to_contain_text("<img src=x")
    await column(page, 1).get_by_role("combobox", name="Model of column 1").fill(MARKUP)
    await column(page, 2).locator(".command summary").click()
    await expect(column(page, 2).get_by_role("region", name="openai-python")).to_contain_text("<script>")
    await page.get_by_role("button", name="History").click()
    await expect(page.get_by_role("dialog")).to_contain_text("<img src=x")
    assert await page.evaluate("window.hacked") is None
    assert await page.locator("main img, main script, dialog img").count() == 0


@pytest.mark.nightly
async def test_one_column_is_stopped_and_then_all(console: Console, open_page: OpenPage) -> None:
    long = {"model": "demo-base", "schema": json.dumps(LONG), "sampling": {"max_tokens": "400"}}
    page = await opened(open_page, console, long, long, long)
    await run(page)
    await expect(column(page, 1).locator(".token").nth(2)).to_be_visible()
    await page.get_by_role("button", name="Stop column 1").click()
    await answer_of(page, 1, "stopped")
    await expect(column(page, 2).locator(".outcome")).to_have_attribute("data-state", "streaming")
    await page.get_by_role("button", name="Stop all").click()
    assert [len(await answer_of(page, number, "stopped")) > 0 for number in (2, 3)] == [True, True]
    await expect(page.get_by_role("button", name="Stop all")).to_be_disabled()


@pytest.mark.nightly
async def test_new_column_has_no_answer_of_one_that_was_removed(console: Console, open_page: OpenPage) -> None:
    short = {"model": "demo-base", "sampling": {"max_tokens": "4"}}
    page = await opened(open_page, console, short, short)
    await run(page)
    await answer_of(page, 2)
    await page.get_by_role("button", name="Remove column 2").click()
    await page.get_by_role("button", name="Add a column").click()
    await expect(column(page, 2)).to_be_visible()
    await expect(column(page, 2).locator(".token")).to_have_count(0)


async def said_by_shell(text: str, key: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", text, stdout=asyncio.subprocess.PIPE, env={"LORA_SERVE_KEY": key, "PATH": "/usr/bin:/bin"}
    )
    out, _ = await process.communicate()
    return str(
        json.loads(out)["choices"][0].get("message", {}).get("content") or json.loads(out)["choices"][0].get("text")
    )


async def said_by_python(text: str) -> str:
    """What the program prints, run in this process: the openai package takes a second to import."""
    printed = io.StringIO()

    def execute() -> None:
        with contextlib.redirect_stdout(printed):
            exec(compile(text, "copied", "exec"), {})

    await asyncio.to_thread(execute)
    return printed.getvalue().removesuffix("\n")


@pytest.mark.many(1)
@pytest.mark.parametrize("mode", ["chat", "completion"])
async def test_copied_texts_give_the_same_answer(
    console: Console, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("LORA_SERVE_KEY", console.admin)
    prompt = """It's "how much" for $HOME and `id`?\n\tNull \\n, true: €\u2028"""
    columns = [
        {"kind": "composition", "members": composed(1, 0.5)["adapters"]},
        {"model": "demo-base", "version": "", "schema": '{"enum": [true, null, "it\'s"]}'},
    ]
    page = await opened(open_page, console, *columns, prompt=prompt, mode=mode, system="Be 'short'")
    await run(page)
    for number in (1, 2):
        answer = await answer_of(page, number)
        await column(page, number).locator(".command summary").click()
        texts = column(page, number).get_by_role("region")
        curl, python = await texts.all_text_contents()
        assert console.admin not in curl + python
        assert await said_by_shell(curl, console.admin) == answer
        assert await said_by_python(python) == answer


@pytest.mark.nightly
async def test_history_holds_prompts_and_settings_alone_until_it_is_turned_off(
    console: Console, open_page: OpenPage
) -> None:
    page = await opened(open_page, console, {"model": SUPPORT}, prompt="Do you sell the Orbit?")
    await run(page)
    answer = await answer_of(page, 1)
    kept = json.dumps(await page.evaluate("[{...localStorage}, {...sessionStorage}]"))
    assert "Do you sell the Orbit?" in kept
    assert SUPPORT in kept
    assert answer not in kept
    assert console.admin not in kept
    await load(page, play({"model": "demo-base"}, prompt="Something else"))
    await page.get_by_role("button", name="History").click()
    await page.get_by_role("dialog").get_by_role("button", name="Do you sell the Orbit?").click()
    await expect(page.get_by_role("textbox", name="Prompt")).to_have_value("Do you sell the Orbit?")
    await expect(column(page, 1)).to_have_attribute("data-model", SUPPORT)
    await page.get_by_role("button", name="History").click()
    await page.get_by_role("checkbox", name="Keep prompts").uncheck()
    await page.keyboard.press("Escape")
    await run(page)
    await answer_of(page, 1)
    assert "Orbit" not in json.dumps(await page.evaluate("({...localStorage})"))


@pytest.mark.nightly
async def test_settings_are_shared_as_text(console: Console, open_page: OpenPage) -> None:
    columns = [
        {"model": SUPPORT, "version": "1", "sampling": {"seed": "7"}},
        {"kind": "composition", "members": composed(1, -0.5)["adapters"]},
    ]
    page = await opened(open_page, console, *columns, prompt="Shared", system="Short")
    await page.get_by_role("button", name="Settings as text").click()
    text = await page.get_by_role("textbox", name="Settings").input_value()
    shared = json.loads(text)
    assert (shared["prompt"], shared["system"], shared["columns"][1]["members"][1]["scale"]) == (
        "Shared",
        "Short",
        -0.5,
    )
    await page.get_by_role("textbox", name="Settings").fill('{"columns": 5}')
    await page.get_by_role("button", name="Use these settings").click()
    await expect(page.get_by_text("holds no settings")).to_be_visible()
    await page.keyboard.press("Escape")
    await load(page, play({"model": "demo-base"}))
    await load(page, text)
    await page.get_by_role("button", name="Settings as text").click()
    assert json.loads(await page.get_by_role("textbox", name="Settings").input_value()) == shared


@pytest.mark.nightly
async def test_models_are_found_by_parts_of_their_names_and_by_keyboard(console: Console, open_page: OpenPage) -> None:
    page = await opened(open_page, console, {"model": "demo-base"}, key=console.inference)
    field = page.get_by_role("combobox", name="Model of column 1")
    await field.fill("l")
    options = column(page, 1).get_by_role("listbox").get_by_role("option")
    names = await options.all_inner_texts()
    visible = [card["id"] for card in console.call("GET", "v1/models", key=console.inference)["data"]]
    assert [name.strip() for name in names] == [name for name in visible if "l" in name]
    await field.fill("sq")
    await field.press("Enter")
    await expect(column(page, 1)).to_have_attribute("data-model", SQL)
    await field.press("ArrowDown")
    await expect(options).to_have_count(len(visible))
    await field.press("ArrowDown")
    await field.press("ArrowUp")
    await field.press("Escape")
    await expect(options).to_have_count(0)
    await expect(field).to_have_value(SQL)
    await field.click()
    await field.press_sequentially("base")
    await options.first.click()
    await expect(column(page, 1)).to_have_attribute("data-model", "demo-base")
    await page.goto(f"{console.url}/ui/#/playground/{SQL}@1".replace(SQL, "acme%2Fsql"))
    await expect(column(page, 2)).to_have_attribute("data-model", f"{SQL}@1")


async def test_key_is_in_no_address_store_or_log(console: Console, open_page: OpenPage, watch: Watch) -> None:
    page = await opened(open_page, console, {"model": SQL}, key=console.inference)
    await run(page)
    await answer_of(page, 1)
    random = console.inference[16:]
    assert not [url for url in watch.urls if random in url]
    assert random not in json.dumps(await page.evaluate("[{...localStorage}, {...sessionStorage}, document.cookie]"))
    assert random not in await page.content()
    assert random not in console.process.log.read_text()


@pytest.mark.nightly
async def test_playground_needs_no_key_where_the_server_asks_for_none(tmp_path: Path, open_page: OpenPage) -> None:
    with serve(tmp_path, "--auth", "off", adapters=1) as process:
        process.wait_until_ready(120)
        page = await open_page(process.url, "#/playground")
        await expect(column(page, 2)).to_be_visible()
        await page.get_by_role("textbox", name="Prompt").fill("Hello")
        await run(page)
        answer = await answer_of(page, 1)
        body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 64}
        assert answer == call(process.url, "POST", "v1/chat/completions", body)["choices"][0]["message"]["content"]
        await column(page, 1).locator(".command summary").click()
        curl = await column(page, 1).get_by_role("region", name="curl").text_content()
        assert curl
        assert await said_by_shell(curl, "") == answer
