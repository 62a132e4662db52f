"""Digests of a content that travel beside it in a Content-Digest header (RFC 9530), whoever receives it."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, cast

import http_sf

from lora_serve.core.errors import InvalidRequestError

CONTENT_DIGEST = "Content-Digest"
_ALGORITHMS = {"sha-256": "sha256", "sha-512": "sha512"}  # the registry's active ones; others are ignored


class ExpectedDigests:
    """What a content must hash to: `update` with every piece of it, then `check`."""

    def __init__(self, header: str | None) -> None:
        """`header`: None: nothing is expected. Raises InvalidRequestError if it cannot be read."""
        self._expected = {} if header is None else _parsed(header)
        self._found = {name: hashlib.new(_ALGORITHMS[name]) for name in self._expected}

    def update(self, chunk: bytes) -> None:
        for content in self._found.values():
            content.update(chunk)

    def check(self) -> None:
        """Raises InvalidRequestError, unless every digest is the content's."""
        for name, digest in self._expected.items():
            if not hmac.compare_digest(self._found[name].digest(), digest):
                raise InvalidRequestError(
                    f"The content is not what its {CONTENT_DIGEST} says ({name}): it was changed on its way."
                )


def content_digest(content: Any) -> str:
    """The header for a content that `hashlib.sha256` has hashed."""
    return http_sf.ser({"sha-256": content.digest()})


def _parsed(header: str) -> dict[str, bytes]:
    try:
        table = cast("dict[str, Any]", http_sf.parse(header.encode("latin-1"), tltype="dictionary"))
    except (ValueError, UnicodeEncodeError):
        raise _unreadable("it is no dictionary of digests") from None
    found = {}
    for name, member in table.items():
        value = member[0] if isinstance(member, tuple) else member
        if name not in _ALGORITHMS:
            continue
        if not isinstance(value, bytes) or len(value) != hashlib.new(_ALGORITHMS[name]).digest_size:
            raise _unreadable(f"{name} is no digest of its length between two colons")
        found[name] = value
    return found


def _unreadable(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The header {CONTENT_DIGEST} cannot be read: {reason} (RFC 9530).")
