"""`lora-serve keys create | list | revoke | whoami`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from rich.table import Table

from lora_serve.commands.flags import tenant_name
from lora_serve.commands.output import plain, time_text
from lora_serve.commands.quota_flags import add_quota_flags, given_quota, quota_text
from lora_serve.commands.verb import Call, Verb, run_verbs
from lora_serve.core.tenant import Role

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([mhd])\Z")
_KEY_ID = re.compile(r"[a-z0-9]{1,64}\Z")


def run(arguments: list[str]) -> int:
    """Runs a subcommand; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_verbs("lora-serve keys", "API keys of a running server's tenants.", VERBS, arguments)


def _tenant_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", type=tenant_name, metavar="TENANT")


def _create_flags(parser: argparse.ArgumentParser) -> None:
    _tenant_flags(parser)
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.INFERENCE.value,
        help="what it is good for (default: inference)",
    )
    parser.add_argument("--label", default="", metavar="TEXT", help="what people call it")
    parser.add_argument("--expires", type=duration, metavar="TIME", help="as 12h or 90d (default: never)")
    add_quota_flags(parser, of_key=True)


def _revoke_flags(parser: argparse.ArgumentParser) -> None:
    _tenant_flags(parser)
    parser.add_argument("id", type=key_id, metavar="ID", help="the 12 characters behind `ls-`")


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


async def create_key(call: Call) -> None:
    """Creates a key and prints only its secret on standard output, for a file or a variable."""
    flags = call.flags
    body: dict[str, Any] = {"role": flags.role, "label": flags.label, "quota": given_quota(flags)}
    if flags.expires is not None:
        body["expires_in"] = flags.expires
    card = (await call.client.call("POST", _path(flags.tenant), body=body)).data
    call.output.show(card, card["secret"])
    until = "" if card["expires"] is None else f", until {time_text(card['expires'])}"
    call.output.note(f"key {card['id']} of {card['tenant']} ({card['role']}{until}); it is not shown again")


async def list_keys(call: Call) -> None:
    document = (await call.client.call("GET", _path(call.flags.tenant))).data
    table = Table(
        "id", "role", "label", "active", "created", "last used", "expires", "limits", box=None, pad_edge=False
    )
    for card in document["data"]:
        times = [time_text(card[name]) for name in ("created", "last_used", "expires")]
        active = "yes" if card["active"] else "no"
        table.add_row(*map(plain, (card["id"], card["role"], card["label"], active, *times, quota_text(card["quota"]))))
    call.output.show(document, table)


async def revoke_key(call: Call) -> None:
    card = (await call.client.call("DELETE", f"{_path(call.flags.tenant)}/{call.flags.id}")).data
    call.output.show(card, f"key {card['id']} of {card['tenant']} revoked")


async def whoami(call: Call) -> None:
    found = (await call.client.call("GET", "/admin/whoami")).data
    base = "" if found["may_use_base"] else ", without the base model"
    call.output.show(found, plain(f"{found['role']} of {found['tenant']}, key {found['key_id']}{base}"))


def _path(tenant: str) -> str:
    return f"/admin/tenants/{tenant}/keys"


VERBS = (
    Verb(
        "create",
        "Make a key; the secret is printed once.",
        ("create acme", "create acme --role tenant-admin --label ci --expires 90d"),
        _create_flags,
        create_key,
    ),
    Verb("list", "List a tenant's keys.", ("list acme", "list acme --json"), _tenant_flags, list_keys),
    Verb(
        "revoke",
        "End a key, on every replica within a second.",
        ("revoke acme k3yk3yk3yk3y",),
        _revoke_flags,
        revoke_key,
    ),
    Verb("whoami", "Say whose key --admin-key is.", ("whoami --admin-key ls-...",), lambda parser: None, whoami),
)
