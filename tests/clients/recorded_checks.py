"""The shapes of requests of programs that are no libraries (recorded/*.json says where they are from). Model and
`max_tokens` are the demo's, as its context is smaller than what the programs ask for.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from checking import Server
from tool_task import MODEL

LAST = ("message_stop", "response.completed", "response.incomplete")


def check_claude_code(server: Server) -> str:
    """The shapes of a session of Claude Code: Anthropic's own tools, deferred ones, betas, edits of the context."""
    return _session(server, "claude_code", {"x-api-key": server.key})


def check_codex(server: Server) -> str:
    """The shapes of a session of Codex CLI: tools of all kinds, calls of them in the history, `store`, verbosity."""
    return _session(server, "codex", {"Authorization": f"Bearer {server.key}"})


def _session(server: Server, name: str, key: dict[str, str]) -> str:
    recorded = json.loads((Path(server.recorded_folder) / f"{name}.json").read_text())
    for one in recorded["requests"]:
        body = {**one["body"], "model": MODEL}
        if "max_tokens" in body:
            body["max_tokens"] = min(body["max_tokens"], 48)
        elif "input" in body:
            body["max_output_tokens"] = 48
        text = _sent(server.url + one["path"], body, {**recorded["headers"], **key})
        if body.get("stream"):
            last = json.loads(text.rstrip().splitlines()[-1].removeprefix("data: "))
            assert last["type"] in LAST, text
        else:
            assert "error" not in json.loads(text), text
    return f"{len(recorded['requests'])} requests"


def _sent(url: str, body: dict[str, Any], headers: dict[str, str]) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read().decode()}") from error
