"""From a record of `logging` to a line, through structlog's processors: fields, context, redaction, form.

What looks like a secret is removed from every line, for any library's lines and tracebacks. The code itself logs no
secret; this is the second line of defence. Paths stay: the log is its operator's own, who looks there for the folder of
the admin key. Answers hold none, as none is put into an error's text that callers see.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import structlog
from structlog.typing import EventDict, Processor

from lora_serve.tenancy.directory_state import IN_TEXT

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


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
FIRST_KEYS = ("time", "level", "logger", "message")  # in this order; the rest follows


def line_formatter(form: str, redaction: Redaction, *, colors: bool = False) -> logging.Formatter:
    """JSON: time (UTC), level, logger, message, the request's fields, the record's extra fields, the traceback.

    Redaction comes last before the form, so that nothing reaches the line around it.
    """
    is_json = form == "json"
    collecting: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_request,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        _drop_private,
    ]
    finishing: list[Processor] = [
        _add_json_time if is_json else _add_console_time,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("message"),
        redaction,
        _in_order,
        *(
            [structlog.processors.JSONRenderer(ensure_ascii=False)]
            if is_json
            else [_on_one_line, _console_form(colors)]
        ),
    ]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=collecting, processors=finishing)


def _drop_private(logger: Any, method: str, event: EventDict) -> EventDict:
    """Ray adds a time of its own to every record of its processes."""
    for key in [key for key in event if key.startswith("_ray_")]:
        del event[key]
    return event


def _console_form(colors: bool) -> Processor:
    """Plain tracebacks: a decorated one shows local variables, and with them prompts."""
    return structlog.dev.ConsoleRenderer(
        colors=colors,
        event_key="message",
        timestamp_key="time",
        pad_event_to=0,
        exception_formatter=structlog.dev.plain_traceback,
    )


def _add_request(logger: Any, method: str, event: EventDict) -> EventDict:
    """The fields of the request that the line belongs to, asked for as it is written: all that is known by then."""
    for key, value in event.pop("log_fields", dict)().items():
        event.setdefault(key, value)
    return event


def _add_json_time(logger: Any, method: str, event: EventDict) -> EventDict:
    created = event["_record"].created
    event["time"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created % 1 * 1000):03d}Z"
    return event


def _add_console_time(logger: Any, method: str, event: EventDict) -> EventDict:
    event["time"] = time.strftime("%H:%M:%S", time.localtime(event["_record"].created))
    return event


def _in_order(logger: Any, method: str, event: EventDict) -> EventDict:
    """Puts the fields of every line first."""
    first = {key: event.pop(key) for key in FIRST_KEYS if key in event}
    return {**first, **event}


def _on_one_line(logger: Any, method: str, event: EventDict) -> EventDict:
    """Escapes line breaks and control characters, except in a traceback; drops fields without a value."""
    return {
        key: value if key == "exception" or not isinstance(value, str) else value.strip().translate(_CONTROL)
        for key, value in event.items()
        if value is not None
    }
