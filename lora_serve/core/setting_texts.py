"""Texts among the settings: which of them can stand in a log, a path, a header and a key of Redis; sizes in bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MAX_LENGTH = 4096  # characters of a text: of a path, on Linux
MAX_BYTES = 2**50  # more than any machine has
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def check_redis_prefix(value: str) -> str:
    """`value`, if keys that begin with it can be looked for: Redis reads patterns. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}", value):
        raise ValueError("expected 1 to 128 letters, digits and `_.:-`, the first a letter, a digit or `_`")
    return value


def check_key(value: str) -> str:
    """`value`, if it can be a bearer key. Raises ValueError."""
    if not value.isascii() or " " in value:
        raise ValueError("expected ASCII characters without a space")
    return value


def is_web_url(text: str) -> bool:
    """True for an http or https URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in text
    except ValueError:
        return False


def check_root_path(value: str) -> str:
    """`value`, if it is the beginning of a path as clients send it. Raises ValueError."""
    if not re.fullmatch(r"(/(?!\.\.?(/|$))[A-Za-z0-9._~-]+)*/?", value):
        raise ValueError("expected a path such as /llm, of letters, digits and `._~-`, in which no part is `.` or `..`")
    return value


def check_text(value: Any) -> Any:
    """A text, or texts, as they may stand in a log, a path and a key; others are left alone. Raises ValueError."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if not isinstance(item, str):
            continue
        if not item.strip():
            raise ValueError("expected a text that is not empty")
        if len(item) > MAX_LENGTH:
            raise ValueError(f"expected at most {MAX_LENGTH} characters, not {len(item)}")
        if _UNPRINTABLE.search(item):
            raise ValueError("expected a text without control characters and without bytes that are not UTF-8")
    return value


def parse_bytes(value: Any) -> Any:
    """`"512MiB"`, `"2GB"`, `"1.5g"` or a plain number -> bytes (int). Anything else raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)b?\s*", value.lower())
    if not match:
        raise ValueError("expected a number of bytes such as 1073741824, 512MiB or 2GB")
    return int(min(float(match[1]) * _UNITS[match[2]], 2.0 * MAX_BYTES))


def template_in(given: str) -> str:
    """The text of --chat-template: that of a file, or `given` itself. Raises OSError, ValueError."""
    file = Path(given)
    return file.read_text("utf-8") if "{" not in given or file.is_file() else given
