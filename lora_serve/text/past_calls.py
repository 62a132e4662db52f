"""Calls of tools in the earlier turns of a chat: read from a request, and written in the form that a template takes."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.strict_json import JsonError, depth_of, parse_json

MAX_ARGUMENTS = 2**18  # characters of one call: parsing holds the GIL
MAX_CALLS = 128  # in one message
MAX_NESTING = 64
SHORT_ID_LENGTH = 9  # Mistral's templates take no other ids
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that the assistant made in an earlier turn."""

    name: str
    arguments: Mapping[str, Any] | str  # the object, if they are one; else their text
    text: str  # of the arguments, as it was given
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The way in which a template takes calls."""

    has_content: bool = True  # an answer without text has the content "", else none
    as_text: bool = False  # arguments are given as JSON text, not as an object
    short_ids: bool = False  # ids have nine letters and digits
    counted_ids: bool = False  # ids are `functions.name:0`, the chat's calls counted, and stand for the names
    one_a_turn: bool = False  # a turn has one call, and its result comes next; others would be lost
    one_text: bool = False  # a turn with a call has content or reasoning, not both


def field_error(where: str, words: str) -> InvalidRequestError:
    """The error of the field at `where`, whose text begins with the place."""
    return InvalidRequestError(f"`{where}`{words}", param=where)


def parse_calls(value: Any, where: str) -> tuple[PastCall, ...]:
    """Check the `tool_calls` of a message. Raises InvalidRequestError naming the call and the field."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise field_error(where, f" must be a list of at most {MAX_CALLS} calls.")
    return tuple(_parse_call(item, f"{where}[{index}]") for index, item in enumerate(value))


def written_call(call: PastCall, form: CallForm, number: int) -> dict[str, Any]:
    """The call as templates read it, in the form of transformers. `number`: of the chat's calls, from 0."""
    arguments = call.text if form.as_text else call.arguments
    function = {"name": call.name, "arguments": arguments}
    call_id = f"functions.{call.name}:{number}" if form.counted_ids else written_id(call.id, form)
    return {"id": call_id, "type": "function", "function": function}


def written_reasoning(text: str) -> dict[str, str]:
    """The reasoning of a turn under all names that templates have for it."""
    return dict.fromkeys(("reasoning", "reasoning_content", "thinking"), text)


def written_id(call_id: str, form: CallForm) -> str:
    """The id of a call as the template takes it; the same id always becomes the same."""
    if not form.short_ids or _is_short(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest(), "big")
    letters = []
    for _ in range(SHORT_ID_LENGTH):
        number, index = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[index])
    return "".join(letters)


def _is_short(call_id: str) -> bool:
    return len(call_id) == SHORT_ID_LENGTH and all(letter in _LETTERS for letter in call_id)


def _parse_call(item: Any, where: str) -> PastCall:
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(item, dict) or kind not in (None, "function"):
        raise field_error(
            where, ' must be {"id": ..., "type": "function", "function": ...}: other tools are not known.'
        )
    call_id, function = item.get("id"), item.get("function")
    if not isinstance(call_id, str | None):
        raise field_error(f"{where}.id", " must be a string.")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise field_error(f"{where}.function", " must be an object with `name` and `arguments`.")
    return _with_arguments(function.get("arguments"), function["name"], call_id or "", f"{where}.function.arguments")


def _with_arguments(value: Any, name: str, call_id: str, where: str) -> PastCall:
    if isinstance(value, dict):
        if depth_of(value) > MAX_NESTING:
            raise field_error(where, f" is nested more than {MAX_NESTING} deep.")
        return PastCall(name, value, json.dumps(value, ensure_ascii=False), call_id)
    if not isinstance(value, str | None):
        raise field_error(where, " must be JSON as a string.")
    text = value or "{}"
    if len(text) > MAX_ARGUMENTS:
        raise field_error(where, f" has {len(text)} characters; {MAX_ARGUMENTS} are allowed.")
    try:
        found = parse_json(text.encode(), max_depth=MAX_NESTING)
    except (JsonError, UnicodeEncodeError):
        found = None
    return PastCall(name, found if isinstance(found, dict) else text, text, call_id)
