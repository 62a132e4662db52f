"""Every field of a chat has a decision in /v1/responses and in /v1/messages: nothing that changes an answer is dropped.

A new field of a chat makes `test_every_field_is_decided` fail until it stands in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.anthropic import serving as messages
from lora_serve.server.anthropic.protocol import MessageFields
from lora_serve.server.json_body import check_fields
from lora_serve.server.openai.responses import serving as responses
from lora_serve.server.openai.responses.protocol import ResponseFields
from lora_serve.server.schemas.fields import Ignored, Refused, marked
from lora_serve.server.schemas.inference import ChatFields

SAID = [{"role": "user", "content": "x"}]
REGEX = {"regex": "a+"}
FORMAT = {"type": "json_object"}
SCHEMA = {"type": "object"}
PASSED, REFUSED, TRANSLATED = "passed on as it is", "refused in words", "read, and said otherwise to the chat"

# Field of a chat -> (a value that changes something, what /v1/responses does with it, what /v1/messages does).
TABLE: dict[str, tuple[Any, str, str]] = {
    "model": ("m", PASSED, PASSED),
    "adapters": ([{"id": "a"}], PASSED, PASSED),
    "adapter_id": ("a", PASSED, PASSED),
    "user": ("u", PASSED, PASSED),
    "safety_identifier": ("u", PASSED, PASSED),
    "priority": (3, PASSED, PASSED),
    "timeout_ms": (9000, PASSED, PASSED),
    "max_cold_wait_ms": (9000, PASSED, PASSED),
    "on_cold": ("fail", PASSED, PASSED),
    "stream": (True, PASSED, PASSED),
    "min_tokens": (3, PASSED, PASSED),
    "temperature": (0.5, PASSED, PASSED),
    "top_p": (0.5, PASSED, PASSED),
    "top_k": (3, PASSED, PASSED),
    "min_p": (0.5, PASSED, PASSED),
    "presence_penalty": (0.5, PASSED, PASSED),
    "frequency_penalty": (0.5, PASSED, PASSED),
    "repetition_penalty": (1.5, PASSED, PASSED),
    "logit_bias": ({"5": 1.0}, PASSED, PASSED),
    "seed": (3, PASSED, PASSED),
    "stop": (["END"], PASSED, REFUSED),
    "stop_token_ids": ([5], PASSED, PASSED),
    "include_stop_str_in_output": (True, PASSED, PASSED),
    "ignore_eos": (True, PASSED, PASSED),
    "allowed_token_ids": ([5], PASSED, PASSED),
    "bad_words": (["x"], PASSED, PASSED),
    "skip_special_tokens": (False, PASSED, PASSED),
    "truncate_prompt_tokens": (5, PASSED, PASSED),
    "truncation_side": ("right", PASSED, PASSED),
    "cache_salt": ("s", PASSED, PASSED),
    "structured_outputs": (REGEX, PASSED, PASSED),
    "guided_json": (SCHEMA, PASSED, PASSED),
    "guided_json_object": (True, PASSED, PASSED),
    "guided_regex": ("a+", PASSED, PASSED),
    "guided_choice": (["a"], PASSED, PASSED),
    "guided_grammar": ('start: "a"', PASSED, PASSED),
    "structural_tag": ({"type": "structural_tag"}, PASSED, PASSED),
    "guided_whitespace_pattern": (" ?", PASSED, PASSED),
    "response_format": (FORMAT, REFUSED, REFUSED),
    "messages": (SAID, REFUSED, TRANSLATED),
    "n": (2, REFUSED, REFUSED),
    "stream_options": ({"include_usage": True}, TRANSLATED, TRANSLATED),  # usage is in the events anyway
    "max_tokens": (5, REFUSED, PASSED),
    "max_completion_tokens": (5, REFUSED, REFUSED),
    "prompt_logprobs": (1, REFUSED, REFUSED),
    "return_tokens_as_token_ids": (True, PASSED, REFUSED),
    "return_token_ids": (True, REFUSED, REFUSED),
    "echo": (True, REFUSED, REFUSED),
    "logprobs": (True, REFUSED, REFUSED),
    "top_logprobs": (2, TRANSLATED, REFUSED),
    "add_generation_prompt": (False, PASSED, REFUSED),
    "continue_final_message": (True, PASSED, REFUSED),
    "add_special_tokens": (True, PASSED, PASSED),
    "chat_template_kwargs": ({"a": 1}, PASSED, PASSED),
    "documents": ([{"text": "x"}], PASSED, PASSED),
    "reasoning_effort": ("low", REFUSED, REFUSED),
    "include_reasoning": (False, PASSED, PASSED),
    "tools": ([], TRANSLATED, TRANSLATED),
    "tool_choice": (None, TRANSLATED, TRANSLATED),
    "parallel_tool_calls": (False, TRANSLATED, REFUSED),
}
# Fields that a chat itself refuses are refused, but for these, which the route has with a meaning of its own.
OWN_MEANING = {"messages.metadata", "responses.metadata"}
ROUTES: dict[str, tuple[Any, Callable[..., dict[str, Any]], dict[str, Any], int]] = {
    "responses": (ResponseFields, responses.chat_fields, {"input": "x"}, 1),
    "messages": (MessageFields, messages.chat_fields, {"messages": SAID, "max_tokens": 5}, 2),
}
UNSERVED = marked(ChatFields.model_fields)


def translated(route: str, name: str, value: Any) -> dict[str, Any]:
    schema, chat_fields, body, _ = ROUTES[route]
    given = {**body, name: value}
    return chat_fields(check_fields(schema, given), given)


def test_every_field_is_decided() -> None:
    assert set(TABLE) == set(ChatFields.model_fields) - set(UNSERVED)


@pytest.mark.many(40)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", TABLE)
def test_field_is_passed_on_or_refused(route: str, name: str) -> None:
    value, decision = TABLE[name][0], TABLE[name][ROUTES[route][3]]
    assert name in ROUTES[route][0].model_fields, "it is in the reference too"
    if decision == REFUSED:
        with pytest.raises(InvalidRequestError) as caught:
            translated(route, name, value)
        assert caught.value.param == name
    elif decision == PASSED:
        assert translated(route, name, value)[name] == value


@pytest.mark.many(25)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", UNSERVED)
def test_what_a_chat_does_not_serve_is_marked_here_too(route: str, name: str) -> None:
    own = marked(ROUTES[route][0].model_fields)
    if f"{route}.{name}" in OWN_MEANING:
        return
    expected = Refused if isinstance(UNSERVED[name], Refused) else Ignored | Refused
    assert isinstance(own.get(name), expected)


@pytest.mark.parametrize("field", [{"structured_outputs": REGEX}, {"guided_regex": "a+"}])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_answer_is_held_to_the_same_grammar(
    http: aiohttp.ClientSession, house: Any, path: str, field: dict[str, Any]
) -> None:
    body = {"input": "x"} if path == "/v1/responses" else {"messages": SAID, "max_tokens": 5}
    for where, given in (("/v1/chat/completions", {"messages": SAID}), (path, body)):
        async with http.post(where, json={**given, **field, "min_tokens": 2}) as answer:
            assert answer.status == 200, await answer.text()
    chat, other = house.engine.requests
    assert chat.grammar is not None
    assert chat.grammar == other.grammar
    assert other.sampling.min_tokens == 2


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", {"input": "x", "text": {"format": FORMAT}}, "text.format"),
        (
            "/v1/messages",
            {"messages": SAID, "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format",
        ),
    ],
)
async def test_two_forms_at_once_are_refused_by_their_names(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], name: str
) -> None:
    async with http.post(path, json={**body, "structured_outputs": REGEX}) as answer:
        text = await answer.text()
    assert answer.status == 400
    assert name in text
    assert "`structured_outputs.regex`" in text
