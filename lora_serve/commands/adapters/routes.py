"""`lora-serve adapters route | canary | rollback | alias | aliases`: choose the version that a name means."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from lora_serve.commands.adapters.card import route_text
from lora_serve.commands.adapters.waiting import shows, wait_for_all
from lora_serve.commands.flags import adapter_id, adapter_path, add_id_argument, add_wait_flag, canary, count, percent
from lora_serve.commands.output import plain
from lora_serve.commands.verb import Call, Verb
from lora_serve.core.errors import ConfigError


def _route_flags(parser: argparse.ArgumentParser) -> None:
    add_id_argument(parser)
    parser.add_argument("version", type=count, metavar="VERSION", help="the version that the id means from now on")
    parser.add_argument(
        "--canary", type=canary, metavar="V=PERCENT", help="give so much of the traffic to version V (default: none)"
    )
    add_wait_flag(parser)


def _canary_flags(parser: argparse.ArgumentParser) -> None:
    add_id_argument(parser)
    parser.add_argument("version", type=count, metavar="VERSION", help="the version to try")
    parser.add_argument("percent", type=percent, metavar="PERCENT", help="its share of the traffic; 0 ends the trial")
    add_wait_flag(parser)


def _rollback_flags(parser: argparse.ArgumentParser) -> None:
    add_id_argument(parser)
    add_wait_flag(parser)


def _alias_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=adapter_id, metavar="NAME")
    parser.add_argument("target", nargs="?", metavar="TARGET", help="an id, ID@VERSION or ID@sha256:...")
    parser.add_argument("--delete", action="store_true", help="take the alias NAME away")


async def set_route(call: Call) -> None:
    await _put_route(call, call.flags.version, call.flags.canary)


async def set_canary(call: Call) -> None:
    """Sends a share of requests to another version than the default one, whichever that is when the server decides."""
    flags = call.flags
    share = {"version": flags.version, "percent": flags.percent} if flags.percent else None
    await _put_route(call, None, share)


async def _put_route(call: Call, version: int | None, share: dict[str, Any] | None) -> None:
    body = {"version": version, "canary": share}
    await _finish(call, (await call.client.call("PUT", adapter_path(call.flags.id, "route"), body=body)).data)


async def roll_back(call: Call) -> None:
    await _finish(call, (await call.client.call("POST", adapter_path(call.flags.id, "rollback"))).data)


async def _finish(call: Call, card: dict[str, Any]) -> None:
    if call.flags.wait:
        await wait_for_all(call, card["id"], shows(card))
    call.output.show(card, f"{card['id']} means version {route_text(card)}")


def check_alias(flags: argparse.Namespace) -> None:
    """Checks the alias's target. Raises ConfigError."""
    if flags.delete and flags.target is not None:
        raise ConfigError("TARGET: not allowed with --delete")
    if not flags.delete and flags.target is None:
        raise ConfigError("TARGET: expected what the alias means, or --delete")


async def change_alias(call: Call) -> None:
    name, path = call.flags.name, f"/admin/aliases/{call.flags.name}"
    if call.flags.delete:
        reply = await call.client.call("DELETE", path)
        call.output.show(reply.data, f"alias {name} deleted")
        return
    reply = await call.client.call("PUT", path, body={"target": call.flags.target})
    call.output.show(reply.data, plain(f"{name} means {reply.data['target']}"))


async def list_aliases(call: Call) -> None:
    document = (await call.client.call("GET", "/admin/aliases")).data
    table = Table("alias", "target", box=None, pad_edge=False)
    for alias in document["data"]:
        table.add_row(plain(alias["alias"]), plain(alias["target"]))
    call.output.show(document, table)


VERBS = (
    Verb(
        "route",
        "Choose the version that an id means, with or without a canary.",
        ("route acme/support 3", "route acme/support 3 --canary 4=10"),
        _route_flags,
        set_route,
    ),
    Verb(
        "canary",
        "Give a share of an id's traffic to another version.",
        ("canary acme/support 4 10", "canary acme/support 4 0"),
        _canary_flags,
        set_canary,
    ),
    Verb(
        "rollback",
        "Go back to the version that an id meant before.",
        ("rollback acme/support", "rollback acme/support --url http://a:8000 --url http://b:8000 --wait"),
        _rollback_flags,
        roll_back,
    ),
    Verb(
        "alias",
        "Give an adapter, or a version of it, another name; or take that name away.",
        ("alias acme/live acme/support", "alias acme/frozen acme/support@3", "alias --delete acme/live"),
        _alias_flags,
        change_alias,
        check=check_alias,
    ),
    Verb("aliases", "List the aliases.", ("aliases", "aliases --json"), lambda parser: None, list_aliases),
)
