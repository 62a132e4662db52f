"""What a server answers and counts, for comparisons."""

from __future__ import annotations

from typing import Any

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.plain_http import call

NAMES = ("tiny", "acme/a", "acme/b", "globex/c", "globex/d")


def answer(process: ServerProcess, name: str, **fields: Any) -> Any:
    body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "logprobs": 2, **fields}
    reply = call(f"{process.url}/v1/completions", body)
    assert reply.status == 200, reply.text
    choice = reply.json["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"], reply.headers["X-Adapter-Digest"]


def metric(process: ServerProcess, name: str) -> float:
    lines = call(f"{process.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))
