"""list, show."""

from __future__ import annotations

import argparse

from lora_serve.commands.adapters.card import card_table, list_table
from lora_serve.commands.flags import adapter_id, adapter_path, add_id_argument, count
from lora_serve.commands.verb import Call, Verb, all_pages
from lora_serve.core.adapter import AdapterState

DEFAULT_LIMIT = 100


def _list_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")
    parser.add_argument("--state", choices=[state.value for state in AdapterState], help="only those in this state")
    parser.add_argument("--after", type=adapter_id, metavar="ID", help="begin behind this id")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--limit", type=count, metavar="N", help=f"at most so many (default: {DEFAULT_LIMIT})")
    number.add_argument("--all", action="store_true", help="all of them, page by page")


async def list_adapters(call: Call) -> None:
    flags = call.flags
    limit = None if flags.all else flags.limit or DEFAULT_LIMIT
    given = {"tenant": flags.tenant, "state": flags.state, "after": flags.after}
    document = await all_pages(call, "/admin/adapters", limit, **given)
    call.output.show(document, list_table(document["data"]))
    if document["has_more"] and not call.output.as_json:
        call.output.note(f"there are more: --all, or --after {document['last_id']}")


async def show_adapter(call: Call) -> None:
    card = (await call.client.call("GET", adapter_path(call.flags.id))).data
    call.output.show(card, *card_table(card))


VERBS = (
    Verb(
        "list",
        "List adapters by their ids, with state, tiers and use.",
        ("list --tenant acme", "list --state on_device --json", "list --all"),
        _list_flags,
        list_adapters,
    ),
    Verb(
        "show",
        "Show an adapter's card.",
        ("show acme/support", "show acme/support --json"),
        add_id_argument,
        show_adapter,
    ),
)
