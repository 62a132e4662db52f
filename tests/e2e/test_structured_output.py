"""Structured output as users see it, with the engine in a thread and in a process of its own."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.plain_http import call

pytestmark = pytest.mark.engines("thread", "process")

SCHEMA = {
    "type": "object",
    "properties": {"customer_number": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["new"]}},
    "required": ["customer_number", "kind"],
    "additionalProperties": False,
}


def completion(server: ServerProcess, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 80, "temperature": 1.0, "seed": 3, **fields}
    return call(f"{server.url}/v1/completions", body)


def test_answers_obey_what_was_asked_for(server: ServerProcess) -> None:
    reply = completion(server, structured_outputs={"regex": "(yes|no), [0-9]{3}"}, n=3, logprobs=2)
    assert reply.status == 200, reply.text
    for choice in reply.json["choices"]:
        assert re.fullmatch("(yes|no), [0-9]{3}", choice["text"])
        assert choice["finish_reason"] == "stop"
        assert "Infinity" not in reply.text
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    reply = completion(server, response_format=format, temperature=0.0, min_tokens=30)
    choice = reply.json["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert choice["text"].startswith("{")
    cut = completion(server, structured_outputs={"choice": ["a very long answer that is cut"]}, max_tokens=3)
    assert cut.json["choices"][0]["finish_reason"] == "length"
    assert "a very long answer that is cut".startswith(cut.json["choices"][0]["text"])


def test_grammar_that_is_wrong_is_400_and_what_it_cost_is_counted(server: ServerProcess) -> None:
    reply = completion(server, structured_outputs={"regex": "(unclosed"})
    assert reply.status == 400, reply.text
    completion(server, structured_outputs={"choice": ["one long word"]})
    figures = dict(
        re.findall(r"^(lora_serve_grammar_\w+?)(?:_total)? (\S+)$", call(f"{server.url}/metrics").text, re.MULTILINE)
    )
    assert float(figures["lora_serve_grammar_masks"]) > 0
    assert float(figures["lora_serve_grammar_forced_tokens"]) > 0
    assert float(figures["lora_serve_grammar_compilations"]) > 0
    assert float(figures["lora_serve_grammar_rows"]) == 0
