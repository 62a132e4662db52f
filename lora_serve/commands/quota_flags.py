"""A flag for each limit of a tenant or a key."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from lora_serve.core.flags import flag_name
from lora_serve.core.setting_texts import parse_bytes
from lora_serve.core.tenant import MAX_LIMIT, TENANT_LIMITS, Quota

NONE = "none"
_HELP = {
    "requests_per_minute": "requests that may begin within a minute",
    "tokens_per_minute": "tokens of prompts and answers within a minute",
    "max_running": "rows that run at the same time",
    "max_queued": "requests that wait at the same time",
    "max_adapters": "registered adapters",
    "max_stored_bytes": "bytes of all registered versions (as 512MiB)",
    "device_bytes_guaranteed": "bytes of device memory that others cannot take (as 512MiB)",
    "device_bytes_max": "bytes of device memory at most (as 512MiB)",
    "registrations_per_minute": "uploads and registrations that may begin within a minute",
}


def add_quota_flags(parser: argparse.ArgumentParser, *, of_key: bool = False) -> None:
    """A flag for each limit that a tenant, or a key, may have."""
    group = parser.add_argument_group(f"limits ({NONE}: no limit)")
    for one in fields(Quota):
        if not (of_key and one.name in TENANT_LIMITS):
            group.add_argument(flag_name(one.name), type=limit, metavar="N", help=_HELP[one.name])


def given_quota(flags: argparse.Namespace) -> dict[str, int | None]:
    """The limits named on the command line, as the admin API's fields."""
    named = {one.name: getattr(flags, one.name, None) for one in fields(Quota)}
    return {name: None if value == NONE else value for name, value in named.items() if value is not None}


def limit(text: str) -> int | str:
    """A count, bytes as 512MiB, or "none"."""
    if text == NONE:
        return NONE
    try:
        value: Any = parse_bytes(text)
        number = int(value)
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_LIMIT:
        raise argparse.ArgumentTypeError(f"expected a number such as 100 or 512MiB, or {NONE} (got {text!r})")
    return number


def quota_text(quota: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in quota.items()) or "-"
