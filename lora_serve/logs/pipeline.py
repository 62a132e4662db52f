"""From a record of `logging` to a line, through structlog's processors: fields, context, redaction, form."""

from __future__ import annotations

import logging
import time
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from lora_serve.core.log_context import current_fields
from lora_serve.logs.redaction import Redaction

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
        *([_json_form()] if is_json else [_on_one_line, _console_form(colors)]),
    ]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=collecting, processors=finishing)


def _drop_private(logger: Any, method: str, event: EventDict) -> EventDict:
    """Ray adds a time of its own to every record of its processes."""
    for key in [key for key in event if key.startswith("_ray_")]:
        del event[key]
    return event


def _json_form() -> Processor:
    return structlog.processors.JSONRenderer(ensure_ascii=False)


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
    for key, value in current_fields().items():
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
