"""Grammars of arguments that are written member by member, as formats whose calls are not JSON do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_serve.core.errors import InvalidRequestError

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
