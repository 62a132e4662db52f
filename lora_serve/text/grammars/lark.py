"""Grammars in Lark, as `llguidance` reads it: of callers, or made by the server around their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from lora_serve.text.grammars.faults import refused

MAX_RULES = 500  # the compiler follows rules by recursion: a stack of 8 MB overflows at some 3000 in a chain
MAX_GROUPS = 1000  # in all rules: they count as much, where a chain leads through them
_GROUP = re.compile(r"[(\[]")
# A string or a regex that does not end is one all the same, so that each character is looked at once.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/?|(?P<json>%json)\b|(?P<name><[^<>\s]+>)')
_BLANKS = re.compile(r"\s*")


def with_schemas(text: str, param: str, rewrite: Callable[[Any], str], max_rules: int | None) -> str:
    """The grammar with the JSON schema behind each `%json` written anew.

    `max_rules`: of a text that a caller wrote; None: the server did, so that its literals are what they seem to be.
    Raises InvalidRequestError.
    """
    parts: list[str] = []
    outside: list[str] = []
    at = 0
    found = _TOKEN.search(text)
    while found is not None:
        if found["json"] is None:
            found = _TOKEN.search(text, found.end())
            continue
        start = _BLANKS.match(text, found.end())
        assert start is not None, "it matches nothing, too"
        try:
            schema, end = json.JSONDecoder().raw_decode(text, start.end())
        except (ValueError, RecursionError):
            line = text.count("\n", 0, found.start()) + 1
            raise refused(param, f"line {line}: no JSON schema stands behind %json") from None
        outside.append(text[at : found.start()])
        parts += [text[at : found.start()], "%json ", rewrite(schema)]
        at = end
        found = _TOKEN.search(text, end)
    outside.append(text[at:])
    if max_rules is not None:
        _check_outside("".join(outside), param, max_rules)
    return "".join(parts) + text[at:]


def with_numbers(text: str, special_ids: Mapping[str, int]) -> str:
    """The grammar with the ids of the special tokens that it names as `<name>`; one that is unknown stays."""

    def numbered(found: re.Match[str]) -> str:
        number = special_ids.get(found["name"] or "")
        return found[0] if number is None else f"<[{number}]>"

    return _TOKEN.sub(numbered, text)


def _check_outside(text: str, param: str, max_rules: int) -> None:
    """Check the grammar without its schemas; each rule has a colon. Raises InvalidRequestError."""
    if "%json" in text:
        raise refused(param, "`%json` stands in a text, a regex or a comment")
    if text.count(":") > max_rules:
        raise refused(param, f"more than {max_rules} rules")
    if len(_GROUP.findall(_TOKEN.sub("", text))) > MAX_GROUPS:
        raise refused(param, f"more than {MAX_GROUPS} groups in brackets")
