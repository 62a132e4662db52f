"""The requests of Claude Code and Codex; scripts/clients sends the same ones to the demo model."""

from __future__ import annotations

import json
import logging
from typing import Any

import aiohttp
import pytest

from tests.clients.running import RECORDED
from tests.server.tools.conftest import Says

SESSIONS = [json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))]
REQUESTS = {
    one["path"] + " " + one["name"]: (session["headers"], one) for session in SESSIONS for one in session["requests"]
}
WHERE = {"role": "user", "content": "Where?"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CODE = {"name": "run", "input_schema": {"type": "object", "properties": {}}}
RUN = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}}


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> tuple[int, str]:
    async with http.post(path, json=body, headers=headers) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("name", REQUESTS)
async def test_recorded_request_is_answered(
    http: aiohttp.ClientSession, house: Any, says: Says, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    says("It is open.")
    headers, recorded = REQUESTS[name]
    body = {**recorded["body"], "model": "tiny-base"}
    if "max_tokens" in body:
        body["max_tokens"] = min(body["max_tokens"], 100)  # this model's context is smaller than what they ask for
    with caplog.at_level(logging.INFO, "lora_serve.server.schemas.constraints"):
        status, text = await post(http, recorded["path"], body, **headers)
    assert status == 200, text
    served = {"function", "custom"} if "messages" in body else {"function"}
    left_out = {tool["type"] for tool in body.get("tools", ()) if tool.get("type", "custom") not in served}
    assert all(repr(kind) in caplog.text for kind in left_out)
    if house.engine.requests:
        prompt = house.services.text.decode(house.engine.requests[0].prompt_token_ids, False)
        assert "x-anthropic-billing-header" not in prompt
        for tool in body.get("tools", ()):
            if tool.get("type", "custom") in served:
                assert tool["name"] in prompt
            else:
                assert f'"{tool.get("name", tool["type"])}"' not in prompt
    if body.get("stream"):
        last = json.loads(text.rstrip().splitlines()[-1].removeprefix("data: "))
        assert last["type"] in ("message_stop", "response.completed")


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_says_that_no_edit_was_made(http: aiohttp.ClientSession, says: Says, stream: bool) -> None:
    says("Yes.")
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    body = {"messages": [WHERE], "max_tokens": 9, "context_management": edits, "stream": stream}
    status, text = await post(http, "/v1/messages", body)
    assert status == 200
    assert '"context_management":{"applied_edits":[]}' in text.replace(" ", "")
    status, text = await post(http, "/v1/messages/count_tokens", body)
    counted = json.loads(text)
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}


async def test_response_shows_the_tools_that_were_used(http: aiohttp.ClientSession, says: Says) -> None:
    says("Yes.")
    status, text = await post(
        http, "/v1/responses", {"input": "x", "tools": [{"type": "web_search"}, RUN], "store": True}
    )
    answer = json.loads(text)
    assert (status, [tool["type"] for tool in answer["tools"]], answer["store"]) == (200, ["function"], False)


FORCED = {
    "messages, a named one": (
        "/v1/messages",
        {"tools": [SEARCH, CODE], "tool_choice": {"type": "tool", "name": "web_search"}},
    ),
    "messages, any of none": ("/v1/messages", {"tools": [SEARCH], "tool_choice": {"type": "any"}}),
    "responses, by its kind": (
        "/v1/responses",
        {"tools": [{"type": "web_search"}, RUN], "tool_choice": {"type": "web_search"}},
    ),
    "responses, any of none": ("/v1/responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    "responses, allowed": (
        "/v1/responses",
        {
            "tools": [{"type": "web_search"}, RUN],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        },
    ),
    "chat, a custom one": (
        "/v1/chat/completions",
        {
            "tools": [{"type": "custom", "custom": {"name": "c"}}],
            "tool_choice": {"type": "custom", "custom": {"name": "c"}},
        },
    ),
}


@pytest.mark.parametrize("case", FORCED)
async def test_forced_tool_that_is_left_out_is_refused(http: aiohttp.ClientSession, case: str) -> None:
    path, fields = FORCED[case]
    prompt = {"input": "x"} if path == "/v1/responses" else {"messages": [WHERE], "max_tokens": 9}
    status, text = await post(http, path, {**prompt, **fields})
    assert (status, "tool_choice" in text) == (400, True)


async def test_choice_among_tools_of_which_none_is_left_is_no_tool(http: aiohttp.ClientSession, says: Says) -> None:
    says("Yes.")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    status, text = await post(http, "/v1/responses", {"input": "x", "tools": [RUN], "tool_choice": choice})
    assert status == 200, text


async def test_image_in_a_result_is_refused_in_words(http: aiohttp.ClientSession) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, image]}
    status, text = await post(
        http, "/v1/messages", {"messages": [{"role": "user", "content": [result]}], "max_tokens": 9}
    )
    assert status == 400
    assert "messages[0].content[0].content[1]" in text
    assert "reads text only" in text
