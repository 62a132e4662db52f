"""Pieces of `llguidance` grammars (its Lark text) from which formats put theirs together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_serve.text.tool_calls.base import Tool

# As Python's json.dumps writes it, which is what models are trained on. Free white space would let a model go on for
# ever with nothing else, and no token would be forced.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if")


def quoted(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, token_ids: Mapping[str, int]) -> str:
    """A marker as its token if it is a single one, else as text."""
    return f"<[{token_ids[text]}]>" if text in token_ids else quoted(text)


def value_of(schema: Mapping[str, Any]) -> str:
    """A JSON value that obeys a schema, spaced as Python's json.dumps does."""
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING})


def arguments_of(tool: Tool) -> str:
    """The JSON object of a tool's arguments: those that the schema names, unless it speaks of others."""
    schema = {**tool.parameters, "type": "object"}
    named, required = schema.get("properties") or {}, schema.get("required") or []
    is_plain = isinstance(named, dict) and isinstance(required, list)  # else whoever compiles it says what is wrong
    if is_plain and named and all(name in named for name in required) and not any(word in schema for word in _OPEN):
        schema["additionalProperties"] = False
    return value_of(schema)


def call_rules(tools: Sequence[Tool], written: Callable[[Tool, str], str]) -> list[str]:
    """Rule `call`: any of the tools. `written` puts a tool's call together from the tool and its arguments' rule."""
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        rules.append(f"call_{number}: {written(tool, f'arguments_{number}')}")
        rules.append(f"arguments_{number}: {arguments_of(tool)}")
    return rules


def named_object(tool: Tool, arguments: str, *, key: str = "arguments") -> str:
    """A call as a JSON object with name and arguments."""
    begin = '{"name": ' + json.dumps(tool.name, ensure_ascii=False) + f', "{key}": '
    return f"{quoted(begin)} {arguments} {quoted('}')}"


def lark(start: str, rules: Sequence[str]) -> str:
    """A whole grammar."""
    return "\n".join(("%llguidance {}", f"start: {start}", *rules)) + "\n"
