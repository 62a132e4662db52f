"""`lora-serve tenants list | create | show | set | delete`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from lora_serve.commands.confirmation import confirm_deletion
from lora_serve.commands.flags import tenant_name
from lora_serve.commands.output import plain, time_text
from lora_serve.commands.quota_flags import add_quota_flags, given_quota, quota_text
from lora_serve.commands.verb import Call, Verb, all_pages, run_verbs
from lora_serve.core.errors import ConfigError

PATH = "/admin/tenants"


def run(arguments: list[str]) -> int:
    """Runs a subcommand; returns the exit code (`commands.failure.ExitCode`). Raises ConfigError."""
    return run_verbs("lora-serve tenants", "Tenants of a running server.", VERBS, arguments)


def _name_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=tenant_name, metavar="NAME")


def _create_flags(parser: argparse.ArgumentParser) -> None:
    _name_flags(parser)
    parser.add_argument("--no-base", dest="base", action="store_false", help="it may not use the base model itself")
    parser.add_argument(
        "--no-offload", dest="offload", action="store_false", help="neighbours (--overflow) may not answer for it"
    )
    add_quota_flags(parser)


def _set_flags(parser: argparse.ArgumentParser) -> None:
    _name_flags(parser)
    parser.add_argument(
        "--base", action=argparse.BooleanOptionalAction, help="whether it may use the base model itself"
    )
    parser.add_argument(
        "--offload", action=argparse.BooleanOptionalAction, help="whether neighbours (--overflow) may answer for it"
    )
    add_quota_flags(parser)


def _delete_flags(parser: argparse.ArgumentParser) -> None:
    _name_flags(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where input is no terminal")


async def list_tenants(call: Call) -> None:
    page = await all_pages(call, PATH, None)
    table = Table("tenant", "base", "offload", "keys", "adapters", "created", "limits", box=None, pad_edge=False)
    for card in page["data"]:
        table.add_row(*map(plain, _cells(card)))
    call.output.show(page, table)


async def create_tenant(call: Call) -> None:
    flags = call.flags
    body = {"name": flags.name, "may_use_base": flags.base, "offload": flags.offload, "quota": given_quota(flags)}
    card = (await call.client.call("POST", PATH, body=body)).data
    call.output.show(card, f"tenant {card['name']} created; it needs a key: lora-serve keys create {card['name']}")


async def show_tenant(call: Call) -> None:
    card = (await call.client.call("GET", f"{PATH}/{call.flags.name}")).data
    call.output.show(card, _facts(card))


def check_set(flags: argparse.Namespace) -> None:
    """Checks that something is to be set. Raises ConfigError."""
    if flags.base is None and flags.offload is None and not given_quota(flags):
        raise ConfigError("set: expected --base, --no-base, --offload, --no-offload or a limit")


async def set_tenant(call: Call) -> None:
    body: dict[str, Any] = {"quota": given_quota(call.flags)}
    if call.flags.base is not None:
        body["may_use_base"] = call.flags.base
    if call.flags.offload is not None:
        body["offload"] = call.flags.offload
    card = (await call.client.call("PATCH", f"{PATH}/{call.flags.name}", body=body)).data
    call.output.show(card, _facts(card))


def confirm(flags: argparse.Namespace) -> None:
    """Asks for confirmation. Raises CommandError if the answer is not yes, and where there is nobody to ask."""
    confirm_deletion(flags.yes, f"the tenant {flags.name} with all its keys and adapters at {flags.server}")


async def delete_tenant(call: Call) -> None:
    reply = (await call.client.call("DELETE", f"{PATH}/{call.flags.name}")).data
    call.output.show(reply, f"tenant {reply['name']} deleted, with {len(reply['adapters'])} adapters")


def _cells(card: dict[str, Any]) -> Iterator[Any]:
    yield card["name"]
    yield "yes" if card["may_use_base"] else "no"
    yield "yes" if card["offload"] else "no"
    yield card["num_keys"]
    yield card["num_adapters"]
    yield time_text(card["created"])
    yield quota_text(card["quota"])


def _facts(card: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    titles = ("tenant", "base model", "offload", "keys", "adapters", "created", "limits")
    for title, value in zip(titles, _cells(card), strict=True):
        table.add_row(title, plain(value))
    return table


VERBS = (
    Verb("list", "List the tenants.", ("list", "list --json"), lambda parser: None, list_tenants),
    Verb(
        "create",
        "Make a tenant.",
        ("create acme", "create acme --no-base --requests-per-minute 600 --max-stored-bytes 10GiB"),
        _create_flags,
        create_tenant,
    ),
    Verb("show", "Show a tenant.", ("show acme",), _name_flags, show_tenant),
    Verb(
        "set",
        "Change a tenant's limits and what it may use.",
        ("set acme --tokens-per-minute 100000", "set acme --tokens-per-minute none --no-base"),
        _set_flags,
        set_tenant,
        check=check_set,
    ),
    Verb(
        "delete",
        "Delete a tenant with its keys and adapters.",
        ("delete acme", "delete acme --yes"),
        _delete_flags,
        delete_tenant,
        check=confirm,
    ),
)
