"""Headers of every answer that keep browsers and caches from doing more with it than show it to who asked."""

from __future__ import annotations

from collections.abc import MutableMapping

from aiohttp import web

SERVER_NAME = "lora-serve"  # not which Python and aiohttp, as by default
# An answer may differ from this where its handler says so: a page brings a policy of its own.
_DEFAULTS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def secure(headers: MutableMapping[str, str]) -> None:
    """Add the headers. Those that let a page of another site read the answer are the browser guard's."""
    for name, value in _DEFAULTS.items():
        headers.setdefault(name, value)
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Server"] = SERVER_NAME


async def add_security_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Called by aiohttp just before an answer's headers are sent, whoever made it."""
    secure(response.headers)
