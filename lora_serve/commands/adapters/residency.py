"""`lora-serve adapters delete | pin | unpin | prefetch | evict`: an adapter leaves, or moves between tiers."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable

from lora_serve.commands.adapters.waiting import is_gone, wait_for_all
from lora_serve.commands.confirmation import confirm_deletion
from lora_serve.commands.flags import adapter_path, add_id_argument, add_wait_flag, count
from lora_serve.commands.verb import Call, Verb


def _delete_flags(parser: argparse.ArgumentParser) -> None:
    add_id_argument(parser)
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


def _post(verb: str) -> Callable[[Call], Awaitable[None]]:
    async def run(call: Call) -> None:
        card = (await call.client.call("POST", adapter_path(call.flags.id, verb))).data
        pinned = ", pinned" if card["pinned"] else ""
        call.output.show(card, f"{card['id']}@{card['version']}: on {', '.join(card['tiers'])}{pinned}")

    return run


def _verb(name: str, summary: str) -> Verb:
    return Verb(name, summary, (f"{name} acme/support",), add_id_argument, _post(name))


VERBS = (
    Verb(
        "delete",
        "Unregister an adapter, or one version of it; running requests finish.",
        ("delete acme/support", "delete acme/support --version 2 --yes"),
        _delete_flags,
        delete_adapter,
        check=confirm,
    ),
    _verb("pin", "Keep an adapter on the device, over restarts too."),
    _verb("unpin", "Let a pinned adapter leave the device again."),
    _verb("prefetch", "Bring an adapter onto the device; ends when it is there."),
    _verb("evict", "Take an adapter off device and host; it stays registered."),
)
