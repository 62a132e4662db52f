"""The playground's pure parts, as the browser runs them: an answer's text and its tokens, times, texts to copy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.async_api import Page

from tests.console.conftest import Console, OpenPage


def entry(text: bytes, logprob: float = -1.0) -> dict[str, Any]:
    return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text), "top_logprobs": []}


def said(content: str, *entries: dict[str, Any], **delta: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content, **delta}, "logprobs": {"content": list(entries)}}]}


async def call(page: Page, module: str, script: str, *values: Any) -> Any:
    """What `script` gives, a function of the module's exports and `values`."""
    code = f"([name, values]) => import(new URL(name, location.href)).then(module => ({script})(module, ...values))"
    return await page.evaluate(code, [f"pages/playground/{module}.js", list(values)])


async def tokens_of(page: Page, *chunks: Any) -> list[list[Any]]:
    """[text, log-probability, channel] of each token that an answer of these chunks shows."""
    script = """({ Answer }, chunks) => {
        const answer = new Answer();
        for (const chunk of chunks) answer.add(chunk);
        answer.end();
        return answer.tokens.map(token => [token.text, token.logprob, token.channel]);
    }"""
    found: list[list[Any]] = await call(page, "stream", script, list(chunks))
    return found


async def test_tokens_are_found_in_the_text_and_no_letter_is_lost(console: Console, open_page: OpenPage) -> None:
    page = await open_page(console.url)
    euro = "€".encode()
    # A character of several tokens shows with its last one; a token without a text, as the end's, not at all.
    found = await tokens_of(
        page, said("Hi", entry(b" Hi")), said("", entry(euro[:1], -2)), said("€ a", entry(euro[1:], -3), entry(b" a")),
        said("", entry(b"<|end|>")),
    )  # fmt: skip
    assert found == [["Hi", -1, "content"], ["€", -3, "content"], [" a", -1, "content"]]
    # Text that waits for a stop string comes later than its tokens.
    found = await tokens_of(page, said("", entry(b"one")), said("", entry(b" two")), said("one two", entry(b" three")))
    assert found == [["one", -1, "content"], [" two", -1, "content"]]
    # Reasoning, then the answer.
    found = await tokens_of(
        page, said("", entry(b"<think>")), said("", entry(b"why"), reasoning_content="why"),
        said("", entry(b"</think>")), said("so", entry(b"so")),
    )  # fmt: skip
    assert found == [["why", -1, "reasoning"], ["so", -1, "content"]]
    # What no token explains stands all the same; so does an answer without log-probabilities.
    assert await tokens_of(page, said("abc", entry(b"x"))) == [["abc", None, "content"]]
    plain = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]
    assert await tokens_of(page, *plain) == [["a", None, "content"], ["b", None, "content"]]


async def test_server_timing_is_read_as_the_standard_writes_it(console: Console, open_page: OpenPage) -> None:
    page = await open_page(console.url)
    script = "({ parseServerTiming }, header) => parseServerTiming(header)"
    header = "queue;dur=0.12, cache;desc=hit, load;desc=x;dur=3, prefill;dur=x, ,"
    assert await call(page, "timing", script, header) == {"queue": 0.12, "load": 3}
    assert await call(page, "timing", script, None) == {}


RUN = """async ({ Run }, reads) => {
    const api = { async stream(path, { onOpen, onBytes, onEvent }) {
        onOpen(new Response("", { headers: { "Server-Timing": "prefill;dur=5" } }));
        for (const chunks of reads) {
            await new Promise(wake => setTimeout(wake, 60));
            onBytes();
            for (const data of chunks) {
                onEvent({ data });
                for (const end = performance.now() + 2; performance.now() < end; );
            }
        }
    } };
    const run = new Run(api, { path: "", body: {} });
    await run.start();
    const { partsOf, tokensPerSecond } = await import("./timing.js");
    return [tokensPerSecond(run.times), partsOf(run.told, run.times).map(part => part.ms)[3], run.times.numTokens];
}"""


async def test_speed_is_of_tokens_that_came_after_the_first_read(console: Console, open_page: OpenPage) -> None:
    page = await open_page(console.url)
    token = said("a", entry(b"a"))
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    script = RUN.replace("./timing.js", f"{console.url}/ui/pages/playground/timing.js")
    assert await call(page, "run", script, [[token, token, token, token, usage]]) == [None, None, 4]  # all in one read
    speed, decoded, _ = await call(page, "run", script, [[token, token], [token], [token, usage]])
    assert 100 < decoded < 2000
    assert speed == pytest.approx(2000 / decoded)
    assert await call(page, "run", script, [[token], [usage]]) == [None, None, 4]  # nothing is known of the others


async def test_numbers_that_a_request_cannot_hold_are_refused(console: Console, open_page: OpenPage) -> None:
    page = await open_page(console.url)
    script = """({ newColumn, requestOf }, seed) => {
        const column = newColumn(0, "m");
        column.sampling.seed = seed;
        try { return requestOf({ mode: "chat", system: "", prompt: "", columns: [column] }, column).body.seed; }
        catch (error) { return error.code; }
    }"""
    assert [await call(page, "request", script, seed) for seed in ("7", "9007199254740993", "1e999", "x")] == [
        7, "number", "number", "number",
    ]  # fmt: skip


async def test_settings_from_elsewhere_are_taken_field_by_field(console: Console, open_page: OpenPage) -> None:
    page = await open_page(console.url)
    script = "({ fromText }, text) => fromText(text)"
    for text in ("", "[]", "null", '{"columns": {}}', "{" * 10):
        assert await call(page, "settings", script, text) is None
    columns = [{"model": {}, "members": [{"id": 1, "scale": "x"}]}, 7]
    strange = {"mode": 5, "prompt": [], "key": "ls-secret", "columns": columns}
    found = await call(page, "settings", script, json.dumps(strange))
    assert (found["mode"], found["prompt"], len(found["columns"]), "key" in found) == ("chat", "", 2, False)
    assert found["columns"][0]["members"] == [{"id": "", "scale": 1}]
