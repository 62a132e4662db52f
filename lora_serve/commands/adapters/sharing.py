"""`lora-serve adapters share`: allow other tenants to use an adapter."""

from __future__ import annotations

import argparse

from lora_serve.commands.failure import CommandError
from lora_serve.commands.flags import adapter_id, adapter_path, tenant_name
from lora_serve.commands.verb import Call, Verb
from lora_serve.core.tenant import EVERYBODY


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", type=adapter_id, metavar="ID")
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


VERBS = (
    Verb(
        "share",
        "Let other tenants use an adapter.",
        ("share acme/support --with globex --with initech", "share acme/support --all", "share acme/support --nobody"),
        _flags,
        share_adapter,
    ),
)
