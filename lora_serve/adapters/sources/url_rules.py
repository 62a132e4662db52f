"""Normalises http(s) URLs, and checks that one lies below an allowed prefix.

The parts of the request are compared, never raw text: `https://host.evil`, `https://host@evil` and `/allowed/../x` all
begin like an allowed URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

from lora_serve.adapters.sources.base import refuse

_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_PLAIN = re.compile(r"[!-\[\]-~]+")  # printable ASCII, no space, no backslash
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ESCAPED_AGAIN = re.compile(r"%(2e|2f|5c|25|00)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Url:
    """The parts of a request; `path` begins with "/" and is percent-encoded in one way only."""

    scheme: str
    host: str
    port: int
    path: str
    query: str

    def __str__(self) -> str:
        """The URL without its query, which may be a signature."""
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}"

    @property
    def target(self) -> str:
        """Path and query for the request line."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def is_below(self, prefix: Url) -> bool:
        """True if `prefix` allows the URL: same scheme, host and port, and its path up to a "/"."""
        if (self.scheme, self.host, self.port) != (prefix.scheme, prefix.host, prefix.port):
            return False
        return self.path == prefix.path or self.path.startswith(prefix.path.rstrip("/") + "/")


def parse_url(text: str) -> Url:
    """The URL. Raises InvalidRequestError for text that is no http(s) URL or is ambiguous."""
    if not _PLAIN.fullmatch(text):
        raise refuse("the URL holds a character that must be percent-encoded")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise refuse("the URL cannot be read") from None
    if parts.scheme not in _PORTS:
        raise refuse("the URL is neither http:// nor https://")
    if "@" in parts.netloc:
        raise refuse("the URL holds credentials; they have no place there")
    match = _AUTHORITY.fullmatch(parts.netloc)
    port = int(match[2] or _PORTS[parts.scheme]) if match else 0
    if match is None or not 0 < port < 65536:
        raise refuse("the URL's host or port is not one")
    if parts.fragment or _BROKEN_ESCAPE.search(parts.query):
        raise refuse("the URL holds a # or a broken % escape")
    return Url(parts.scheme, match[1].lower().rstrip("."), port, _path(parts.path or "/"), parts.query)


def join_url(base: Url, location: str) -> Url:
    """The target of a redirect from `base`. Raises InvalidRequestError."""
    try:
        return parse_url(urljoin(f"{base}", location))
    except ValueError:
        raise refuse("the URL cannot be read") from None


def _path(path: str) -> str:
    if _BROKEN_ESCAPE.search(path):
        raise refuse("the URL holds a broken % escape")
    first, *segments = path.split("/")
    assert first == "", path
    if "" in segments[:-1]:
        raise refuse("the URL's path holds an empty part")
    return "/" + "/".join(map(_segment, segments))


def _segment(segment: str) -> str:
    """The segment in one normal form. A ".." is refused in every form that some server would accept."""
    raw = unquote_to_bytes(segment)
    plain = raw.decode("latin-1")
    if (
        plain.partition(";")[0] in (".", "..")
        or re.search(r"[/\\\x00-\x1f\x7f]", plain)
        or _ESCAPED_AGAIN.search(plain)
    ):
        raise refuse("the URL's path leads up, or hides what it means")
    return quote(raw, safe="!$&'()*+,;=:@~")
