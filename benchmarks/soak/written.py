"""Answers whose form was asked for: JSON by a schema, and calls of tools, held against these by `jsonschema`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

SEATS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Köln", "Oslo"]},
        "seats": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 40}, "maxItems": 3},
        "is_paid": {"type": "boolean"},
    },
    "required": ["city", "seats", "is_paid"],
    "additionalProperties": False,
}
PAID = {
    "type": "object",
    "properties": {"number": {"enum": [7, 11]}, "note": {"type": "string", "maxLength": 5}},
    "required": ["number"],
    "additionalProperties": False,
}
CALLED = {"book": SEATS, "pay": PAID}  # the tools' names, and the schemas of their arguments
MAX_TOKENS = 600  # more than the longest text that fits, blanks and all
MESSAGES = ({"role": "user", "content": "Two seats to Rome"},)


def json_question(name: str, seed: int) -> dict[str, Any]:
    """The body that asks for seats, in words of a random model."""
    shape = {"type": "json_schema", "json_schema": {"name": "seats", "schema": SEATS, "strict": True}}
    return {**_question(name, seed), "response_format": shape}


def call_question(name: str, seed: int) -> dict[str, Any]:
    """The body after which one tool must be called."""
    tools = [{"type": "function", "function": {"name": tool, "parameters": CALLED[tool]}} for tool in CALLED]
    return {**_question(name, seed), "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}


def _question(name: str, seed: int) -> dict[str, Any]:
    return {"model": name, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed}


def json_fault(answer: Mapping[str, Any]) -> str:
    """What is wrong with the answer to a `json_question`; empty: nothing."""
    choice = answer["choices"][0]
    if choice["finish_reason"] != "stop":
        return f"it ended by {choice['finish_reason']}: {choice['message']}"
    return _fault(choice["message"]["content"], SEATS)


def call_fault(answer: Mapping[str, Any]) -> str:
    """What is wrong with the answer to a `call_question`; empty: nothing."""
    choice = answer["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] != "tool_calls" or len(calls) != 1:
        return f"it ended by {choice['finish_reason']} with {len(calls)} calls: {choice['message']}"
    called = calls[0]["function"]
    if called["name"] not in CALLED:
        return f"there is no tool {called['name']!r}"
    return _fault(called["arguments"], CALLED[called["name"]])


def _fault(text: str, schema: Mapping[str, Any]) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"{text!r} is no JSON: {error}"
    errors = [error.message for error in Draft202012Validator(schema).iter_errors(value)]
    return f"{text!r}: {errors}" if errors else ""
