"""`lora-serve adapters share`: allow other tenants to use an adapter."""

from __future__ import annotations

import argparse

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
    reply = await call.client.call("PUT", adapter_path(flags.id, "sharing"), body={"shared_with": shared_with})
    names = reply.data["shared_with"]
    who = "all tenants" if names == [EVERYBODY] else ", ".join(names) or "nobody"
    call.output.show(reply.data, f"{reply.data['id']} is shared with {who}")


VERBS = (
    Verb(
        "share",
        "Let other tenants use an adapter.",
        ("share acme/support --with globex --with initech", "share acme/support --all", "share acme/support --nobody"),
        _flags,
        share_adapter,
    ),
)
