"""Removes what looks like a secret from every log line, for any library's lines and tracebacks.

The code itself logs no secret; this is the second line of defence. Paths stay: the log is its operator's own, who looks
there for the folder of the admin key. Answers hold none, as none is put into an error's text that callers see.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from structlog.typing import EventDict

from lora_serve.tenancy.directory.keys import IN_TEXT

if TYPE_CHECKING:
    from lora_serve.core.settings import Settings

HIDDEN = "***"
_PATTERNS = (
    (IN_TEXT, rf"ls-\1-{HIDDEN}"),  # a tenant's key: its id may stay
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",;)]+"), rf"\1 {HIDDEN}"),  # an Authorization header
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)[^\s/@:'\"]*:[^\s/'\"]*@"), rf"\1{HIDDEN}@"),  # a password in a URL
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), f"hf_{HIDDEN}"),  # a hub token
)
_SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_MIN_SECRET = 6  # characters: a shorter one would be found inside ordinary words


class Redaction:
    """A processor of structlog that works on every text of an event, however deeply nested."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """`secrets`: texts that are never shown."""
        self._secrets = sorted({secret for secret in secrets if len(secret) >= _MIN_SECRET}, key=len, reverse=True)

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        return {key: self._cleaned(value) for key, value in event.items()}

    def text(self, text: str) -> str:
        """`text` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text

    def _cleaned(self, value: Any) -> Any:
        match value:
            case str():
                return self.text(value)
            case bool() | int() | float() | None:
                return value
            case dict():
                return {self.text(str(key)): self._cleaned(item) for key, item in value.items()}
            case list() | tuple() | set() | frozenset():
                return [self._cleaned(item) for item in value]
            case _:
                return self.text(str(value))


def passwords_in(*urls: str | None) -> list[str]:
    """The passwords of URLs, both as written there and percent-decoded."""
    found: set[str] = set()
    for url in urls:
        try:
            password = urlsplit(url).password if url else None
        except ValueError:
            continue
        if password:
            found |= {password, unquote(password)}
    return sorted(found)


def redaction_for(settings: Settings) -> Redaction:
    """Shows nothing in place of keys and passwords."""
    secrets = [
        settings.admin_key or "",
        settings.overflow_api_key or "",
        *settings.api_key,
        *passwords_in(settings.redis_url, settings.otlp_traces_endpoint),
    ]
    return Redaction([*secrets, *(os.environ.get(name, "") for name in _SECRET_VARIABLES)])
