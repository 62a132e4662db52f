"""Pieces of `llguidance` grammars (its Lark text) from which formats put theirs together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_serve.core.errors import InvalidRequestError
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


MAX_MEMBERS = 1000  # the compiler follows their rules by recursion: a stack of 8 MB overflows at some 2500
_JOINING = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired"),
    *("dependentSchemas", "maxProperties", "minProperties", "patternProperties", "propertyNames"),
    "unevaluatedProperties",
)  # keywords with which one member depends on another


def members_of(schema: Mapping[str, Any], place: str) -> dict[str, tuple[Any, bool]]:
    """The schema of each property of an object, and whether it is required.

    Raises InvalidRequestError if the object's members cannot be told one by one. `place` names it.
    """
    joining = [word for word in _JOINING if word in schema]
    if joining:
        raise InvalidRequestError(
            f"{place}: this model's tool-call format cannot force an object with {', '.join(joining)}; list its "
            "properties, or use tool_choice auto",
            param="tools",
        )
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    needed = frozenset(map(str, required))
    members = {str(name): (member, str(name) in needed) for name, member in properties.items()}
    members |= {str(name): ({}, True) for name in required if name not in properties}
    if len(members) > MAX_MEMBERS:
        message = f"{place}: this model's tool-call format cannot force more than {MAX_MEMBERS} members"
        raise InvalidRequestError(f"{message}; use tool_choice auto", param="tools")
    return members


def sequence(rule: str, pairs: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """Rule `rule`: `pairs` (a rule and whether it must come) in their order, with commas between them."""
    rules, begun, first_of = [], [], []
    for number, (pair, is_required) in enumerate(pairs):
        tail = f"{rule}_after_{number + 1}" if number + 1 < len(pairs) else ""
        joined = f"{comma} {pair}"
        begun.append(f"{rule}_after_{number}: {joined if is_required else f'({joined})?'} {tail}")
        if all(not earlier for _, earlier in pairs[:number]):
            first_of.append(f"{pair} {tail}")
    if not any(is_required for _, is_required in pairs):
        first_of.append('""')
    rules.append(f"{rule}: {' | '.join(first_of)}")
    return rules + begun[1:]
