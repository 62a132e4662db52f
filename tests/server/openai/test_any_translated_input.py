"""Whatever stands in a body for /v1/responses, /v1/messages or /inference/v1/generate: fields of a chat, or a 400."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.anthropic import serving as anthropic
from lora_serve.server.anthropic.protocol import MessageFields
from lora_serve.server.json_body import check_fields
from lora_serve.server.openai.responses import serving as responses
from lora_serve.server.openai.responses.protocol import ResponseFields
from lora_serve.server.openai.tokens import GenerateFields, completion_fields
from lora_serve.server.schemas.inference import ChatFields, CompletionFields
from lora_serve.text.chat import parse_messages

WORDS = st.sampled_from((
    "message", "reasoning", "function_call", "function_call_output", "function", "custom", "auto", "any",
    "tool", "none", "json_schema", "allowed_tools", "user", "assistant", "system", "text", "thinking",
    "tool_use", "tool_result", "input_text", "output_text", "enabled", "x",
))  # fmt: skip
NAMES = st.sampled_from((
    "type", "role", "content", "text", "name", "arguments", "call_id", "output", "id", "input", "tool_use_id",
    "is_error", "thinking", "schema", "format", "effort", "tools", "mode", "function", "parameters",
    "input_schema", "description", "strict", "summary",
))  # fmt: skip
LEAVES = WORDS | st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats(allow_nan=False) | st.text(max_size=4)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=12
)


def bodies(schema: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(schema.model_fields)), VALUES, max_size=6)


def without_null(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


@given(bodies(ResponseFields), VALUES)
def test_any_response(body: dict[str, Any], value: Any) -> None:
    given = without_null({**body, "input": value})
    with suppress(InvalidRequestError):
        asked = responses.chat_fields(check_fields(ResponseFields, given), given)
        parse_messages(check_fields(ChatFields, asked).messages)


@given(bodies(MessageFields), VALUES)
def test_any_message(body: dict[str, Any], value: Any) -> None:
    given = without_null({"max_tokens": 5, **body, "messages": [{"role": "user", "content": value}, value]})
    with suppress(InvalidRequestError):
        asked = anthropic.chat_fields(check_fields(MessageFields, given), given)
        parse_messages(check_fields(ChatFields, asked).messages)


@given(bodies(GenerateFields), bodies(CompletionFields), st.lists(st.integers(-1, 9), max_size=3) | VALUES)
def test_any_tokens(body: dict[str, Any], sampling: dict[str, Any], tokens: Any) -> None:
    given = without_null({**body, "sampling_params": sampling, "token_ids": tokens})
    with suppress(InvalidRequestError):
        check_fields(CompletionFields, completion_fields(check_fields(GenerateFields, given), given))
