"""Jobs and answers between the server and a rendering process: JSON, which cannot make objects of their own.

A value is written with its kind, so that marked texts keep what they stand for: [0, items], [1, pairs], [2, marked
text, true text]; everything else stands for itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lora_serve.text.marked import Marked, true_text


def packed(value: Any) -> Any:
    """The value in JSON's types."""
    match value:
        case Marked():
            return [2, str.__str__(value), str.__str__(true_text(value))]
        case Mapping():
            return [1, [[packed(key), packed(item)] for key, item in value.items()]]
        case list() | tuple():
            return [0, [packed(item) for item in value]]
    return value


def unpacked(value: Any, meaning: Callable[[str], str]) -> Any:
    """The value that was packed; `meaning`: of its marks."""
    if not isinstance(value, list):
        return value
    if value[0] == 2:
        return Marked(value[1], value[2], meaning)
    if value[0] == 1:
        return {unpacked(key, meaning): unpacked(item, meaning) for key, item in value[1]}
    return [unpacked(item, meaning) for item in value[1]]


def frame_of(message: Mapping[str, Any]) -> bytes:
    """The message as ASCII, so that halves of surrogate pairs survive."""
    return json.dumps(message).encode()
