"""Hosts and origins as browsers write them (RFC 6454, RFC 9110 7.2), read so that two spellings of one are equal."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

# Names as browsers send them: ASCII (an international name in its xn-- form), no user, no zone of an IPv6 address.
_HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?))(?::(?P<port>[0-9]{0,5}))?"
)
_ORIGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>.+)")
_PORTS = {"http": 80, "https": 443}
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Host:
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
    def of(cls, scheme: str, host: Host) -> Origin:
        """The origin of pages that `host` serves under `scheme`."""
        return cls(scheme, host.name, host.port or _PORTS.get(scheme))


def parse_host(text: str) -> Host | None:
    """`name`, `name:port`, `[address]:port` -> Host; None if it is none of them."""
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    port = int(match["port"] or 0)
    name = match["name"].lower().removesuffix(".") if match["name"] else _shortest(match["address"])
    return Host(name, port or None) if name and port <= MAX_PORT else None


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
