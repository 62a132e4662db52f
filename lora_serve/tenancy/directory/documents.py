"""Tenants and keys as the JSON texts that a journal keeps."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from lora_serve.core.tenant import MAX_LIMIT, NO_LIMITS, ApiKey, Quota, Role, Tenant, check_tenant_name

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_LIMITS = {one.name for one in fields(Quota)}
_log = logging.getLogger(__name__)
T = TypeVar("T")


def document_of(record: Tenant | ApiKey) -> str:
    """The record as text."""
    shown = asdict(record)
    shown["quota"] = limits_of(record.quota)
    return json.dumps(shown, separators=(",", ":"))


def limits_of(quota: Quota) -> dict[str, int]:
    """The limits that there are, by name."""
    return {name: limit for name, limit in asdict(quota).items() if limit is not None}


def tenant_of(name: str, text: str) -> Tenant | None:
    """None, and a line in the log, for a text that nobody of us has written."""
    return _read("tenant", name, text, _tenant)


def key_of(key_id: str, text: str) -> ApiKey | None:
    """As above."""
    return _read("key", key_id, text, _key)


def times_of(text: str) -> dict[str, float]:
    """When keys were last used, by id; what makes no sense is left out."""
    try:
        found = json.loads(text)
        return {key_id: float(time) for key_id, time in found.items() if isinstance(time, int | float)}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _read(kind: str, name: str, text: str, parse: Callable[[str, Mapping[str, Any]], T]) -> T | None:
    try:
        return parse(name, json.loads(text))
    except Exception as error:
        # Whatever it is, this one opens nothing and the others go on. Nothing of its text is shown.
        _log.error("the record of the %s %.128r cannot be read and is left out: %s", kind, name, type(error).__name__)
        return None


def _tenant(name: str, found: Mapping[str, Any]) -> Tenant:
    _check(found["name"] == name)
    check_tenant_name(name)
    may_use_base = found["may_use_base"]
    _check(isinstance(may_use_base, bool))
    return Tenant(name, _quota(found["quota"]), may_use_base, _time(found["created"]))


def _key(key_id: str, found: Mapping[str, Any]) -> ApiKey:
    _check(found["id"] == key_id and isinstance(found["label"], str) and _HEX.match(found["digest"]) is not None)
    return ApiKey(
        key_id,
        check_tenant_name(found["tenant"]),
        Role(found["role"]),
        found["digest"],
        found["label"],
        _quota(found["quota"]),
        _time(found["created"]),
        None if found["expires"] is None else _time(found["expires"]),
        None if found["revoked"] is None else _time(found["revoked"]),
    )


def _quota(found: Mapping[str, Any]) -> Quota:
    known = {name: limit for name, limit in found.items() if name in _LIMITS}  # a newer server may know more
    _check(all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_LIMIT for n in known.values()))
    return Quota(**known) if known else NO_LIMITS


def _time(value: Any) -> float:
    _check(isinstance(value, int | float) and math.isfinite(value))
    return float(value)


def _check(is_right: bool) -> None:
    if not is_right:
        raise ValueError
