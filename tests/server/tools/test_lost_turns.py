"""An engine is lost in the midst of a call of a tool: of the turn that is given nothing stands twice."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import pytest

from tests.server.tools.conftest import Says
from tests.server.tools.test_messages_tools import ASKED, CITY, HI, KOELN

FUNCTION = {"name": "get_weather", "parameters": CITY}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HI], "tools": [{"type": "function", "function": FUNCTION}], "n": 2},
    "/v1/responses": {"input": [HI], "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": ASKED,
}
RANDOM = re.compile(r'"(id|call_id|item_id|request_id|created|created_at)": ?("[^"]*"|\d+)')


@pytest.mark.parametrize("path", ROUTES)
async def test_turn_that_was_lost_unseen_is_given_once(http: aiohttp.ClientSession, says: Says, path: str) -> None:
    found: list[str] = []
    for lost_after in ((), (24, 2)):  # in the midst of the call, and of a character
        says(f"😀 I look.\n{KOELN}", lost_after=lost_after)
        async with http.post(path, json=ROUTES[path]) as answer:
            found.append(RANDOM.sub("", await answer.text()))
            assert answer.status == 200, found
    assert "get_weather" in found[0]
    assert found[0] == found[1]
