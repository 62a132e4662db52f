"""LiteLLM: the SDK, and its proxy in front of this server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import litellm
from checking import BASE, PERSON, SQL, SQL_ANSWER, SQL_PROMPT, Server
from tool_task import MODEL, QUESTION, TOOLS

READY_SECONDS = 180.0


def _asked(server: Server, model: str, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    where = {"api_base": server.v1, "api_key": server.key}
    return litellm.completion(model=f"hosted_vllm/{model}", messages=messages, temperature=0, **where, **fields)


def check_completion(server: Server) -> None:
    """`completion` of the provider hosted_vllm, whole and streamed."""
    assert _asked(server, SQL, SQL_PROMPT, max_tokens=64).choices[0].message.content == SQL_ANSWER
    chunks = _asked(server, SQL, SQL_PROMPT, max_tokens=64, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SQL_ANSWER


def check_response_format(server: Server) -> None:
    """`response_format` with a JSON schema."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    made = _asked(server, BASE, "Who is it?", max_tokens=150, response_format=form)
    assert set(json.loads(made.choices[0].message.content)) == {"name", "age", "role"}


def check_tools(server: Server) -> None:
    """A tool call comes back as OpenAI's."""
    made = _asked(server, MODEL, QUESTION, max_tokens=100, tools=TOOLS)
    assert made.choices[0].finish_reason == "tool_calls"
    json.loads(made.choices[0].message.tool_calls[0].function.arguments)


def check_proxy(server: Server) -> None:
    """LiteLLM's proxy passes a chat on and brings the answer back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parameters = {"model": f"hosted_vllm/{SQL}", "api_base": server.v1, "api_key": server.key}
    config = Path("proxy.yaml")
    config.write_text(json.dumps({"model_list": [{"model_name": "sql", "litellm_params": parameters}]}))
    program = str(Path(sys.executable).parent / "litellm")
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": "sk-checks"}
    with Path("proxy.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as it:
        try:
            _wait(f"http://127.0.0.1:{port}/health/liveliness", it)
            body = {"model": "sql", "messages": [{"role": "user", "content": SQL_PROMPT}], "temperature": 0}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": "Bearer sk-checks"},
            )
            with urllib.request.urlopen(request) as answer:
                assert json.loads(answer.read())["choices"][0]["message"]["content"] == SQL_ANSWER
        finally:
            it.terminate()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(Path("proxy.log").read_text()[-3000:]) from None
            time.sleep(0.5)
