"""Errors as words, so that they can cross to another process and be raised there."""

from __future__ import annotations

from typing import Any

import msgspec

from lora_serve.core.errors import InternalError, LoraServeError

_OS_ERROR = "OSError"


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error of the tree in `core/errors.py`, or an OSError."""

    kind: str  # the class's name
    message: str
    fields: dict[str, Any]  # what the error carries beside its message


def fault_of(error: Exception) -> Fault:
    """What is neither of the tree nor an OSError becomes an InternalError without details: log it first."""
    if isinstance(error, LoraServeError):
        return Fault(type(error).__name__, str(error), vars(error))
    if isinstance(error, OSError):
        return Fault(_OS_ERROR, error.strerror or "input/output error", {"errno": error.errno or 0})
    return Fault(InternalError.__name__, "The engine met an error of its own.", {})


def error_of(fault: Fault) -> LoraServeError | OSError:
    """The same error, made anew: each caller gets one of its own."""
    if fault.kind == _OS_ERROR:
        return OSError(fault.fields.get("errno", 0), fault.message)
    kind = _kinds().get(fault.kind, InternalError)
    error = kind.__new__(kind)
    Exception.__init__(error, fault.message)
    vars(error).update({name: _frozen(value) for name, value in fault.fields.items()})
    return error


def _kinds() -> dict[str, type[LoraServeError]]:
    found: dict[str, type[LoraServeError]] = {}
    left: list[type[LoraServeError]] = [LoraServeError]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found


def _frozen(value: Any) -> Any:
    """Tuples come as lists."""
    return tuple(value) if isinstance(value, list) else value
