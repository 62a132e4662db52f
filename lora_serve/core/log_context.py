"""The request that a line of log belongs to, asked for when the line is written: all that is known by then is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

LogFields = Callable[[], Mapping[str, object]]
_current: ContextVar[LogFields | None] = ContextVar("lora_serve_log_fields", default=None)


@contextmanager
def logged_with(fields: LogFields) -> Iterator[None]:
    """Lines written inside, by this task or one that it starts, carry what `fields` returns at that moment."""
    token = _current.set(fields)
    try:
        yield
    finally:
        _current.reset(token)


def current_fields() -> Mapping[str, object]:
    """The log fields of the request in whose task the caller runs; empty outside of a request."""
    fields = _current.get()
    return fields() if fields is not None else {}
