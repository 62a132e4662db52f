"""`lora-serve tenants`, `keys`, `usage`, `audit`: tenants, their API keys, what they used, who did what."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter

from rich.table import Table

from lora_serve.commands.flags import (
    CSV,
    YES,
    add_key_limits,
    add_tenant_limits,
    argument,
    count,
    tenant_name,
)
from lora_serve.commands.output import (
    Columns,
    byte_seconds_text,
    csv_cell,
    facts_table,
    plain,
    seconds_text,
    table_of,
    time_text,
    yes_or_no,
)
from lora_serve.commands.verb import Document, Given, Verb, run_alone, run_verbs
from lora_serve.core.errors import ConfigError
from lora_serve.core.tenant import Role

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([mhd])\Z")
_KEY_ID = re.compile(r"[a-z0-9]{1,64}\Z")


def duration(text: str) -> int:
    """Seconds of a text such as 30m, 12h or 90d. Raises ArgumentTypeError."""
    match = _DURATION.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30m, 12h or 90d (got {text!r})")
    return int(match[1]) * _UNITS[match[2]]


def key_id(text: str) -> str:
    if not _KEY_ID.match(text):
        raise argparse.ArgumentTypeError("expected a key's id, not the whole secret")
    return text


def check_change(given: Given) -> None:
    """Checks that something is to be set. Raises ConfigError."""
    if not any(name in ("may_use_base", "offload") or name.startswith("quota.") for name in given):
        raise ConfigError("set: expected --base, --no-base, --offload, --no-offload or a limit")


def _limits_text(card: Document) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in card["quota"].items()) or "-"


_TENANT_COLUMNS: Columns = {
    "tenant": itemgetter("name"),
    "base": lambda card: yes_or_no(card["may_use_base"]),
    "offload": lambda card: yes_or_no(card["offload"]),
    "keys": itemgetter("num_keys"),
    "adapters": itemgetter("num_adapters"),
    "created": lambda card: time_text(card["created"]),
    "limits": _limits_text,
}
_KEY_COLUMNS: Columns = {
    "id": itemgetter("id"),
    "role": itemgetter("role"),
    "label": itemgetter("label"),
    "active": lambda card: yes_or_no(card["active"]),
    "created": lambda card: time_text(card["created"]),
    "last used": lambda card: time_text(card["last_used"]),
    "expires": lambda card: time_text(card["expires"]),
    "limits": _limits_text,
}


def _show_tenant(card: Document, given: Given) -> Table:
    titles = {"base": "base model"}
    return facts_table((titles.get(title, title), cell(card)) for title, cell in _TENANT_COLUMNS.items())


def _note_key(card: Document) -> Iterator[str]:
    until = "" if card["expires"] is None else f", until {time_text(card['expires'])}"
    yield f"key {card['id']} of {card['tenant']} ({card['role']}{until}); it is not shown again"


def _show_caller(found: Document, given: Given) -> str:
    base = "" if found["may_use_base"] else ", without the base model"
    return plain(f"{found['role']} of {found['tenant']}, key {found['key_id']}{base}")


_TENANT, _OF_TENANT = (argument("tenant", type=tenant_name, metavar=metavar) for metavar in ("NAME", "TENANT"))
TENANT_VERBS = (
    Verb(
        "list",
        "List the tenants.",
        ("list", "list --json"),
        (),
        "GET /admin/tenants",
        lambda page, _: table_of(page["data"], _TENANT_COLUMNS),
        page_limit=float("inf"),
    ),
    Verb(
        "create",
        "Make a tenant.",
        ("create acme", "create acme --no-base --requests-per-minute 600 --max-stored-bytes 10GiB"),
        (
            argument("name", type=tenant_name, metavar="NAME"),
            argument(
                "--no-base", dest="may_use_base", action="store_false", help="it may not use the base model itself"
            ),
            argument(
                "--no-offload",
                dest="offload",
                action="store_false",
                help="neighbours (--overflow) may not answer for it",
            ),
            add_tenant_limits,
        ),
        "POST /admin/tenants",
        lambda card, _: f"tenant {card['name']} created; it needs a key: lora-serve keys create {card['name']}",
    ),
    Verb("show", "Show a tenant.", ("show acme",), (_TENANT,), "GET /admin/tenants/{tenant}", _show_tenant),
    Verb(
        "set",
        "Change a tenant's limits and what it may use.",
        ("set acme --tokens-per-minute 100000", "set acme --tokens-per-minute none --no-base"),
        (
            _TENANT,
            argument(
                "--base",
                dest="may_use_base",
                action=argparse.BooleanOptionalAction,
                help="whether it may use the base model itself",
            ),
            argument(
                "--offload",
                action=argparse.BooleanOptionalAction,
                help="whether neighbours (--overflow) may answer for it",
            ),
            add_tenant_limits,
        ),
        "PATCH /admin/tenants/{tenant}",
        _show_tenant,
        check=check_change,
    ),
    Verb(
        "delete",
        "Delete a tenant with its keys and adapters.",
        ("delete acme", "delete acme --yes"),
        (_TENANT, YES),
        "DELETE /admin/tenants/{tenant}",
        lambda reply, _: f"tenant {reply['name']} deleted, with {len(reply['adapters'])} adapters",
        deletes=lambda given: f"the tenant {given['tenant']} with all its keys and adapters",
    ),
)
KEY_VERBS = (
    Verb(
        "create",
        "Make a key; the secret is printed once.",
        ("create acme", "create acme --role tenant-admin --label ci --expires 90d"),
        (
            _OF_TENANT,
            argument(
                "--role",
                choices=[role.value for role in Role],
                default=Role.INFERENCE.value,
                help="what it is good for (default: inference)",
            ),
            argument("--label", metavar="TEXT", help="what people call it"),
            argument(
                "--expires", dest="expires_in", type=duration, metavar="TIME", help="as 12h or 90d (default: never)"
            ),
            add_key_limits,
        ),
        "POST /admin/tenants/{tenant}/keys",
        lambda card, _: card["secret"],  # alone on standard output, for a file or a variable
        note=_note_key,
    ),
    Verb(
        "list",
        "List a tenant's keys.",
        ("list acme", "list acme --json"),
        (_OF_TENANT,),
        "GET /admin/tenants/{tenant}/keys",
        lambda page, _: table_of(page["data"], _KEY_COLUMNS),
    ),
    Verb(
        "revoke",
        "End a key, on every replica within a second.",
        ("revoke acme k3yk3yk3yk3y",),
        (_OF_TENANT, argument("key", type=key_id, metavar="ID", help="the 12 characters behind `ls-`")),
        "DELETE /admin/tenants/{tenant}/keys/{key}",
        lambda card, _: f"key {card['id']} of {card['tenant']} revoked",
    ),
    Verb(
        "whoami", "Say whose key --admin-key is.", ("whoami --admin-key ls-...",), (), "GET /admin/whoami", _show_caller
    ),
)

_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
_SECONDS = ("queue_seconds", "load_seconds", "compute_seconds", "residency_byte_seconds")
_FIGURES: Columns = {
    **{name.replace("_", " "): itemgetter(name) for name in _COUNTS},
    "queue": lambda row: seconds_text(row["queue_seconds"]),
    "load": lambda row: seconds_text(row["load_seconds"]),
    "compute": lambda row: seconds_text(row["compute_seconds"]),
    "residency": lambda row: byte_seconds_text(row["residency_byte_seconds"]),
}


def _show_usage(document: Document, given: Given) -> Table:
    return table_of(document["data"], {**{name: itemgetter(name) for name in document["by"]}, **_FIGURES}, _FIGURES)


def _usage_lines(document: Document) -> Iterator[Iterable[object]]:
    names = [*document["by"], *_COUNTS, *_SECONDS]
    yield names
    yield from ([row[name] for name in names] for row in document["data"])


USAGE = Verb(
    "lora-serve usage",
    "Show what tenants used, as it was metered.",
    (),
    (
        argument("--tenant", metavar="NAME", help="only this tenant's"),
        argument("--adapter", metavar="ID", help="only of this adapter; the base model's name for the base"),
        argument("--key", metavar="ID", help="only of this API key"),
        argument("--from", metavar="TIME", help="Unix seconds or a date (UTC); default: all"),
        argument("--to", metavar="TIME", help="likewise; the end is not included"),
        argument("--by", metavar="NAMES", help="sum by these: tenant, adapter, version, digest, key, time, day"),
        CSV,
    ),
    "GET /admin/usage",
    _show_usage,
    csv=_usage_lines,
    note=lambda document: _others_missing(document, "usage", "these figures are this server's own"),
)

_AUDIT_COLUMNS = ("time", "key", "tenant", "role", "action", "subject", "owner", "outcome", "digest", "request_id")


def _others_missing(document: Document, what: str, rest: str) -> list[str]:
    complete = document.get("is_complete", True)
    return [] if complete else [f"warning: other replicas' {what} cannot be had at present: {rest}"]


def _act(row: Document) -> list[str]:
    moment = datetime.fromtimestamp(row["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    return [moment, *(str(row[name]) for name in _AUDIT_COLUMNS[1:])]


def _show_acts(document: Document, given: Given) -> Table:
    columns = {name.replace("_", " "): itemgetter(place) for place, name in enumerate(_AUDIT_COLUMNS[:8])}
    return table_of(map(_act, document["data"]), columns)


def _act_lines(document: Document) -> Iterator[Iterable[object]]:
    yield _AUDIT_COLUMNS
    yield from (map(csv_cell, _act(row)) for row in document["data"])


AUDIT = Verb(
    "lora-serve audit",
    "Show the audit log: who did what, newest first.",
    (),
    (
        argument("--tenant", metavar="NAME", help="only acts by this tenant's keys, or about what it owns"),
        argument("--limit", type=count, metavar="N", help="at most so many (100)"),
        argument("--after", metavar="ID", help="go on behind this line"),
        CSV,
    ),
    "GET /admin/audit",
    _show_acts,
    page_limit=100,
    csv=_act_lines,
    hint=lambda page: [f"there are more: --limit, or --after {page['last_id']}"] if page["has_more"] else [],
    note=lambda document: _others_missing(document, "acts", "these are this server's own"),
)

# Each takes the arguments and returns the exit code (`commands.output.ExitCode`); raises ConfigError.
run_tenants = partial(run_verbs, "lora-serve tenants", "Tenants of a running server.", TENANT_VERBS)
run_keys = partial(run_verbs, "lora-serve keys", "API keys of a running server's tenants.", KEY_VERBS)
run_usage, run_audit = partial(run_alone, USAGE), partial(run_alone, AUDIT)
