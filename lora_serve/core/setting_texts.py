"""Texts among the settings: which of them can stand in a log, a path, a header and a key of Redis; sizes in bytes.

Hosts and origins are as browsers write them (RFC 6454, RFC 9110 7.2), read so that two spellings of one are equal.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MAX_LENGTH = 4096  # characters of a text: of a path, on Linux
MAX_BYTES = 2**50  # more than any machine has
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Names as browsers send them: ASCII (an international name in its xn-- form), no user, no zone of an IPv6 address.
_HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?))(?::(?P<port>[0-9]{0,5}))?"
)
_ORIGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>.+)")
_PORTS = {"http": 80, "https": 443}
MAX_PORT = 65_535


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


@dataclass(frozen=True, slots=True)
class WebHost:
    """A host name in small letters, without a dot at its end, or an IP address, IPv6 in its shortest form."""

    name: str
    port: int | None = None  # None: not said

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The IP address; None for a name, which DNS may lead anywhere."""
        try:
            return ipaddress.ip_address(self.name)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a page. `port`: None where none is given and the scheme has no usual one."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def of(cls, scheme: str, host: WebHost) -> Origin:
        """The origin of pages that `host` serves under `scheme`."""
        return cls(scheme, host.name, host.port or _PORTS.get(scheme))


def parse_host(text: str) -> WebHost | None:
    """`name`, `name:port`, `[address]:port` -> WebHost; None if it is none of them."""
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    port = int(match["port"] or 0)
    name = match["name"].lower().removesuffix(".") if match["name"] else _shortest(match["address"])
    return WebHost(name, port or None) if name and port <= MAX_PORT else None


def parse_name(text: str) -> str | None:
    """A host without a port, an IPv6 address with or without its brackets -> its name; None if it is none."""
    host = parse_host(f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text)
    return None if host is None or host.port is not None else host.name


def parse_origin(text: str) -> Origin | None:
    """`scheme://host:port` -> Origin; None for anything else, `null` among it."""
    match = _ORIGIN.fullmatch(text)
    host = parse_host(match["host"]) if match else None
    return Origin.of(match["scheme"].lower(), host) if match and host else None


def _shortest(address: str) -> str:
    try:
        return ipaddress.IPv6Address(address).compressed
    except ValueError:
        return ""
