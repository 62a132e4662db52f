"""Fields that say what an answer must be: they reach the engine as a grammar, or are refused with the place."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from llguidance import LLMatcher
from openai import AsyncOpenAI

from lora_serve.core.config import ServerConfig

BASE = "tiny-base"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
ASKED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "json_schema"),
    ({"response_format": NAMED}, '"x":{"type":"integer"}'),
    ({"structured_outputs": {"json": POINT}}, '"x":{"type":"integer"}'),
    ({"structured_outputs": {"json": json.dumps(POINT)}}, '"x":{"type":"integer"}'),
    ({"structured_outputs": {"regex": "[a-z]+"}}, "start: /[a-z]+/"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, 'CHOICE: "yes" | "no"'),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "start:"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, '"whitespace_flexible":false'),
    ({"guided_json": POINT, "guided_decoding_backend": "outlines"}, '"x":{"type":"integer"}'),
    ({"guided_regex": "[a-z]+"}, "start: /[a-z]+/"),
    ({"guided_choice": ["yes", "no"]}, 'CHOICE: "yes" | "no"'),
    ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
]
UNSAID = {"type": "json_schema", "json_schema": {"name": "a"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    ({"response_format": UNSAID}, "response_format.json_schema.schema", "missing"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs", "yaml"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "list"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "one of them"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "one of them"),
    ({"guided_json": '{"type":'}, "guided_json", "JSON"),
    ({"guided_json": 5}, "guided_json", "schema"),
    ({"guided_regex": "a(b"}, "guided_regex", "character 2"),
    ({"guided_grammar": 'start: "a" foo'}, "guided_grammar", "line 1, column"),
    ({"guided_grammar": '{"a": 1}\nstart: "a"'}, "guided_grammar", "line 1"),
    ({"guided_json": False}, "guided_json", "nsatisfiable"),
    ({"guided_regex": "x" * 70_000}, "guided_regex", "--max-grammar-size"),
    ({"guided_json": {"enum": ["x" * 100] * 700}}, "guided_json", "--max-grammar-size"),
]  # fmt: skip


@pytest.fixture
def server_config() -> ServerConfig:
    return ServerConfig(
        model="", served_model_name=(BASE,), auth_mode="off", max_body_size=2**20, max_grammar_size=2**16
    )


@pytest.mark.many(6)
@pytest.mark.parametrize(("asked", "part"), ASKED)
async def test_what_is_asked_for_reaches_every_row_as_a_grammar(
    openai: AsyncOpenAI, house: Any, asked: dict[str, Any], part: str
) -> None:
    await openai.chat.completions.create(model=BASE, messages=HI, max_tokens=2, n=2, extra_body=asked)
    await openai.completions.create(model=BASE, prompt=["a", "b"], max_tokens=2, extra_body=asked)
    grammars = [request.grammar for request in house.engine.requests]
    assert len(grammars) == 4
    assert len(set(map(id, grammars))) == 1, "the second request finds the first one's"
    assert part in grammars[0].text
    assert LLMatcher.validate_grammar(grammars[0].text) == ""


@pytest.mark.parametrize("asked", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
async def test_requests_that_ask_for_nothing_have_no_grammar(
    openai: AsyncOpenAI, house: Any, asked: dict[str, Any]
) -> None:
    await openai.chat.completions.create(model=BASE, messages=HI, max_tokens=2, extra_body=asked)
    assert house.engine.requests[0].grammar is None


@pytest.mark.many(8)
@pytest.mark.parametrize(("asked", "param", "words"), REFUSED)
async def test_what_cannot_be_done_is_refused_with_the_place(
    http: aiohttp.ClientSession, house: Any, asked: dict[str, Any], param: str, words: str
) -> None:
    async with http.post("/v1/completions", json={"model": BASE, "prompt": "x", **asked}) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 1000
    assert house.engine.requests == []
