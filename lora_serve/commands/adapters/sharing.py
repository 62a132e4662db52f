"""`lora-serve adapters share | describe`: who may use an adapter; its metadata, defaults for requests among it."""

from __future__ import annotations

import argparse

from lora_serve.commands.adapters.card import metadata_text
from lora_serve.commands.failure import CommandError
from lora_serve.commands.flags import adapter_path, add_id_argument, json_object, tenant_name
from lora_serve.commands.verb import Call, Verb
from lora_serve.core.tenant import EVERYBODY


def _share_flags(parser: argparse.ArgumentParser) -> None:
    add_id_argument(parser)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--with", dest="tenants", action="append", type=tenant_name, metavar="TENANT",
                       help="this tenant; repeatable, whoever is not named may no longer use it")  # fmt: skip
    group.add_argument("--all", action="store_true", help="every tenant")
    group.add_argument("--nobody", action="store_true", help="its owner alone")


async def share_adapter(call: Call) -> None:
    flags = call.flags
    shared_with = [EVERYBODY] if flags.all else flags.tenants or []
    try:
        reply = await call.client.call("PUT", adapter_path(flags.id, "sharing"), body={"shared_with": shared_with})
    except CommandError as error:
        raise _in_commands(error, shared_with) from None
    names = reply.data["shared_with"]
    who = "all tenants" if names == [EVERYBODY] else ", ".join(names) or "nobody"
    call.output.show(reply.data, f"{reply.data['id']} is shared with {who}")


def _in_commands(error: CommandError, names: list[str]) -> CommandError:
    """The refusal of a tenant that is not there, with the command that makes it in place of the server's route."""
    unknown = next((name for name in names if f"`{name}`" in error.lines[0]), "NAME")
    made = f"lora-serve tenants create {unknown}"
    lines = (line.replace("(POST /admin/tenants)", f"({made})") for line in error.lines)
    return CommandError(error.code, *lines, retry_after=error.retry_after)


def _describe_flags(parser: argparse.ArgumentParser) -> None:
    add_id_argument(parser)
    parser.add_argument("metadata", type=json_object, metavar="JSON", help="a JSON object; it takes the place of all "
                        "that was there, defaults too, unless --merge is given")  # fmt: skip
    parser.add_argument(
        "--merge", action="store_true", help="change the names in JSON alone (one that is null is taken away)"
    )


async def describe_adapter(call: Call) -> None:
    path, metadata = adapter_path(call.flags.id), call.flags.metadata
    if call.flags.merge:
        merged = (await call.client.call("GET", path)).data["metadata"] | metadata
        metadata = {name: value for name, value in merged.items() if value is not None}
    card = (await call.client.call("PATCH", path, body={"metadata": metadata})).data
    call.output.show(card, f"{card['id']} has other metadata", metadata_text(card))
    call.output.warn(card["warnings"])


VERBS = (
    Verb(
        "share",
        "Let other tenants use an adapter.",
        ("share acme/support --with globex --with initech", "share acme/support --all", "share acme/support --nobody"),
        _share_flags,
        share_adapter,
    ),
    Verb(
        "describe",
        "Change an adapter's metadata: notes of your own, and the defaults of requests that name it.",
        (
            'describe acme/support \'{"team": "support", "sampling": {"temperature": 0.2, "max_tokens": 300}}\'',
            'describe acme/support --merge \'{"sampling": {"temperature": 0.4}}\'',
        ),
        _describe_flags,
        describe_adapter,
    ),
)
