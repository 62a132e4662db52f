"""Tenants and keys as the JSON texts that a journal keeps."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import msgspec

from lora_serve.core.tenant import MAX_LIMIT, ApiKey, Quota, Tenant, check_tenant_name

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_LATER = ("offload",)  # fields that the records of earlier versions do not have: nobody had forbidden it
_log = logging.getLogger(__name__)
Record = TypeVar("Record", Tenant, ApiKey)


def document_of(record: Tenant | ApiKey) -> str:
    """The record as text."""
    shown = asdict(record)
    shown["quota"] = limits_of(record.quota)
    return json.dumps(shown, separators=(",", ":"))


def limits_of(quota: Quota) -> dict[str, int]:
    """The limits that there are, by name."""
    return {name: limit for name, limit in asdict(quota).items() if limit is not None}


def tenant_of(name: str, text: str) -> Tenant | None:
    """The record in a text; None, and a line in the log, for a text that no server has written."""
    return _read(Tenant, name, text)


def key_of(key_id: str, text: str) -> ApiKey | None:
    """The record in a text; None, and a line in the log, for a text that no server has written."""
    return _read(ApiKey, key_id, text)


def times_of(text: str) -> dict[str, float]:
    """When keys were last used, by id; what makes no sense is left out."""
    try:
        found = json.loads(text)
        return {key_id: float(time) for key_id, time in found.items() if isinstance(time, int | float)}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _read(kind: type[Record], name: str, text: str) -> Record | None:
    try:
        record = msgspec.json.decode(text, type=kind)
        _check(record, name, msgspec.json.decode(text))
    except Exception as error:
        # Whatever it is, this one opens nothing, its name is held, and the others go on. Nothing of its text is shown.
        word, reason = "tenant" if kind is Tenant else "key", type(error).__name__
        held = "requests get a 503 and nobody takes its name until it is restored, or the admin deletes it"
        _log.error("the record of the %s %.128r cannot be read and is left out (%s): %s", word, name, reason, held)
        return None
    return record


def _check(record: Tenant | ApiKey, name: str, found: Mapping[str, Any]) -> None:
    """Raises ValueError or RequestError for values that no server writes; their types are right already."""
    own_name, tenant = (record.id, record.tenant) if isinstance(record, ApiKey) else (record.name, record.name)
    check_tenant_name(tenant)
    is_right = (
        own_name == name
        and (isinstance(record, Tenant) or _HEX.match(record.digest) is not None)
        # A default would open more than was meant.
        and all(field.name in found for field in fields(record) if field.name not in _LATER)
        and all(0 <= limit <= MAX_LIMIT for limit in limits_of(record.quota).values())
    )
    if not is_right:
        raise ValueError
