"""Cuts `added_tokens` out of a tokenizer.json, without building the megabytes of vocabulary beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lora_serve.adapters.regular_file import open_regular, pieces_of, size_of
from lora_serve.core.errors import InvalidAdapterError

TOKENIZER_NAME = "tokenizer.json"
MAX_TOKENIZER_BYTES = 48 * 2**20
MAX_LIST_BYTES = 4 * 2**20  # of added_tokens
_MAX_DEPTH = 32
_KEY = "added_tokens"
# Possessive: a string without an end fails at once.
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_MARK = re.compile(_STRING + rb"|[{}\[\]\"]", re.DOTALL)  # a quote alone: of a string without an end
_OPENING = re.compile(rb"\s*\{\s*")
_NAME = re.compile(rb"\s*(" + _STRING + rb")\s*:\s*", re.DOTALL)
_SCALAR = re.compile(rb"[^\s,{}\[\]\"]+|" + _STRING, re.DOTALL)
_NEXT = re.compile(rb"\s*([,}])")


def added_tokens_text(path: Path) -> bytes:
    """The JSON text of `added_tokens`; an empty list if there is none. Raises InvalidAdapterError, OSError."""
    with open_regular(path) as file:
        if not 0 < size_of(file) <= MAX_TOKENIZER_BYTES:
            raise _broken(f"it is empty, no file of its own, or larger than {MAX_TOKENIZER_BYTES} bytes")
        text = b"".join(pieces_of(file))
    position = _after(_OPENING, text, 0)
    while text[position : position + 1] not in (b"}", b""):
        name = _NAME.match(text, position)
        if name is None:
            raise _broken("it is not a JSON object")
        end = _end_of_value(text, name.end())
        if _decoded(name[1]) == _KEY:
            if end - name.end() > MAX_LIST_BYTES:
                raise _broken(f"its added_tokens take more than {MAX_LIST_BYTES} bytes")
            return text[name.end() : end]
        position = _after(_NEXT, text, end)
    return b"[]"


def _end_of_value(text: bytes, start: int) -> int:
    if text[start : start + 1] not in (b"{", b"["):
        return _after(_SCALAR, text, start)
    depth = 0
    for mark in _MARK.finditer(text, start):
        sign = mark[0]
        if sign == b'"':  # looked for on, every escaped quote behind it would be taken for a string's beginning
            break
        if sign[:1] == b'"':
            continue
        depth += 1 if sign in (b"{", b"[") else -1
        if depth == 0:
            return mark.end()
        if depth > _MAX_DEPTH:
            raise _broken("it is nested too deeply")
    raise _broken("it is not a JSON object")


def _after(pattern: re.Pattern[bytes], text: bytes, start: int) -> int:
    match = pattern.match(text, start)
    if match is None:
        raise _broken("it is not a JSON object")
    return match.end()


def _decoded(name: bytes) -> str:
    try:
        return str(json.loads(name))
    except ValueError:
        raise _broken("it is not a JSON object") from None


def _broken(reason: str) -> InvalidAdapterError:
    return InvalidAdapterError([f"{TOKENIZER_NAME}: {reason}"])
