"""Grammars in Lark, as `llguidance` reads it: of callers, or made by the server around their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from lora_serve.text.grammars.faults import refused

MAX_RULES = 500  # the compiler follows rules by recursion: a stack of 8 MB overflows at some 3000 in a chain
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<json>%json)\b')
_BLANKS = re.compile(r"\s*")


def with_schemas(text: str, param: str, rewrite: Callable[[Any], str]) -> str:
    """The grammar with the JSON schema behind each `%json` written anew. Raises InvalidRequestError, also for more
    rules than the compiler can follow.
    """
    parts: list[str] = []
    num_rules = at = 0
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
        num_rules += _check_outside(text[at : found.start()], param)
        parts += [text[at : found.start()], "%json ", rewrite(schema)]
        at = end
        found = _TOKEN.search(text, end)
    num_rules += _check_outside(text[at:], param)
    if num_rules > MAX_RULES:
        raise refused(param, f"more than {MAX_RULES} rules")
    return "".join(parts) + text[at:]


def _check_outside(text: str, param: str) -> int:
    """No less than the number of rules in a part of the grammar without schemas. Raises InvalidRequestError."""
    if "%json" in text:
        raise refused(param, "`%json` stands in a text, a regex or a comment")
    return text.count(":")
