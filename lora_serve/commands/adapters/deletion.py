"""`lora-serve adapters delete`."""

from __future__ import annotations

import argparse

from lora_serve.commands.adapters.waiting import is_gone, wait_for_all
from lora_serve.commands.confirmation import confirm_deletion
from lora_serve.commands.flags import adapter_id, adapter_path, add_wait_flag, count
from lora_serve.commands.verb import Call, Verb


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", type=adapter_id, metavar="ID")
    parser.add_argument("--version", type=count, metavar="N", help="only this version (default: all of them)")
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where input is no terminal")
    add_wait_flag(parser)


def confirm(flags: argparse.Namespace) -> None:
    """Asks for confirmation. Raises CommandError if the answer is not yes, and where there is nobody to ask."""
    versions = "all versions of" if flags.version is None else f"version {flags.version} of"
    confirm_deletion(flags.yes, f"{versions} the adapter {flags.id} at {flags.server}")


async def delete_adapter(call: Call) -> None:
    flags = call.flags
    query = None if flags.version is None else {"version": str(flags.version)}
    reply = await call.client.call("DELETE", adapter_path(flags.id), query=query)
    if flags.wait:
        await wait_for_all(call, flags.id, is_gone(flags.version))
    label = flags.id if flags.version is None else f"{flags.id}@{flags.version}"
    call.output.show(reply.data, f"{label} deleted")


VERBS = (
    Verb(
        "delete",
        "Unregister an adapter, or one version of it; running requests finish.",
        ("delete acme/support", "delete acme/support --version 2 --yes"),
        _flags,
        delete_adapter,
        check=confirm,
    ),
)
