"""Any JSON object as the body of each route: its fields, the chat that it stands for, its tools, its constraint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.admin import protocol as admin
from lora_serve.server.anthropic import serving as anthropic
from lora_serve.server.anthropic.protocol import CountTokensFields, MessageFields
from lora_serve.server.inference.reading import amount_of
from lora_serve.server.json_body import check_fields, parse_json
from lora_serve.server.openai import tokens
from lora_serve.server.openai.responses import serving as responses
from lora_serve.server.openai.responses.protocol import ResponseFields
from lora_serve.server.openai.tokens import GenerateFields, completion_fields
from lora_serve.server.schemas import pooling
from lora_serve.server.schemas.constraints import constraint_of, tool_use
from lora_serve.server.schemas.fields import Fields
from lora_serve.server.schemas.inference import ChatFields, CompletionFields
from lora_serve.text.chat import parse_messages
from tests.fuzz.mutating import within, written

ERRORS = (InvalidRequestError,)
OTHERS = tuple(
    kind
    for module in (admin, pooling, tokens)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Fields) and kind.__module__ == module.__name__
    if not issubclass(kind, admin.Query)
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "model": "a",
    "temperature": 0.5,
    "top_p": 1,
    "n": 1,
    "stop": ["x"],
    "logit_bias": {"1": 2},
    "seed": 3,
    "user": "u",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "adapters": [{"id": "a", "scale": 0.5}],
    "chat_template_kwargs": {"a": [1]},
    "logprobs": True,
    "top_logprobs": 2,
}
MESSAGES = {
    "model": "a",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s"}],
    "stop_sequences": ["x"],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "h", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r", "is_error": False}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any"},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "metadata": {"user_id": "u"},
}
RESPONSE = {
    "model": "a",
    "instructions": "i",
    "max_output_tokens": 4,
    "text": {"format": {"type": "json_object"}},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "tool_choice": "auto",
    "reasoning": {"effort": "low"},
}


def fuzz(data: bytes) -> None:
    given = parse_json(data)
    if not isinstance(given, dict):
        raise InvalidRequestError("no object")
    for kind in OTHERS:
        with contextlib.suppress(InvalidRequestError):
            check_fields(kind, given)
    with contextlib.suppress(InvalidRequestError):
        constraint_of(check_fields(CompletionFields, given))
    with contextlib.suppress(InvalidRequestError):
        check_fields(CompletionFields, completion_fields(check_fields(GenerateFields, given), given))
    for name in (CountTokensFields, MessageFields):
        with contextlib.suppress(InvalidRequestError):
            _chat(anthropic.chat_fields(check_fields(name, given), given))
    with contextlib.suppress(InvalidRequestError):
        _chat(responses.chat_fields(check_fields(ResponseFields, given), given))
    _chat(given)


def _chat(given: dict[str, Any]) -> None:
    fields = check_fields(ChatFields, given)
    messages = parse_messages(fields.messages)
    assert messages
    amount_of(fields.tools)
    tool_use(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    constraint_of(fields)


def seeds() -> Iterator[bytes]:
    yield from map(written, (CHAT, MESSAGES, RESPONSE))
    yield written({"prompt": ["a", "b"], "max_tokens": 1, "logprobs": 1, "echo": True, "guided_choice": ["a"]})
    yield written({"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "temperature": 0}, "stream": False})
    yield written({"input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 3})
    yield written({"id": "a/b", "source": "s", "metadata": {"a": "b"}, "pin": True, "version": 2, "target": "x"})
    yield written({"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "a+"}})


_WORDS = {
    *CHAT,
    *MESSAGES,
    *RESPONSE,
    *ChatFields.model_fields,
    *CompletionFields.model_fields,
    *GenerateFields.model_fields,
}
for _kind in (*OTHERS, MessageFields, ResponseFields):
    _WORDS |= _kind.model_fields.keys()
_WORDS |= {
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function",
    "image_url",
    "input_text",
    "tool_result",
    "json_schema",
    "user",
    "assistant",
    "developer",
    "none",
    "auto",
    "required",
    "any",
    "disabled",
    "refusal",
}
mutate = within(json.loads, written, tuple(sorted(_WORDS)))
