"""`lora-serve adapters pin | unpin | prefetch | evict`: move an adapter between tiers."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable

from lora_serve.commands.flags import adapter_id, adapter_path
from lora_serve.commands.verb import Call, Verb


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", type=adapter_id, metavar="ID")


def _post(verb: str) -> Callable[[Call], Awaitable[None]]:
    async def run(call: Call) -> None:
        card = (await call.client.call("POST", adapter_path(call.flags.id, verb))).data
        pinned = ", pinned" if card["pinned"] else ""
        call.output.show(card, f"{card['id']}@{card['version']}: on {', '.join(card['tiers'])}{pinned}")

    return run


def _verb(name: str, summary: str) -> Verb:
    return Verb(name, summary, (f"{name} acme/support",), _flags, _post(name))


VERBS = (
    _verb("pin", "Keep an adapter on the device, over restarts too."),
    _verb("unpin", "Let a pinned adapter leave the device again."),
    _verb("prefetch", "Bring an adapter onto the device; ends when it is there."),
    _verb("evict", "Take an adapter off device and host; it stays registered."),
)
