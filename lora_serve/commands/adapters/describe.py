"""`lora-serve adapters describe`: change an adapter's metadata, its defaults for requests among it."""

from __future__ import annotations

import argparse
import json

from lora_serve.commands.flags import adapter_id, adapter_path, json_object
from lora_serve.commands.verb import Call, Verb


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", type=adapter_id, metavar="ID")
    parser.add_argument("metadata", type=json_object, metavar="JSON", help="a JSON object; it takes the place of all "
                        "that was there")  # fmt: skip


async def describe_adapter(call: Call) -> None:
    flags = call.flags
    card = (await call.client.call("PATCH", adapter_path(flags.id), body={"metadata": flags.metadata})).data
    defaults = "no defaults for requests" if card["defaults"] is None else f"defaults {json.dumps(card['defaults'])}"
    call.output.show(card, f"{card['id']} has other metadata; {defaults}")


VERBS = (
    Verb(
        "describe",
        "Change an adapter's metadata: notes of your own, and the defaults of requests that name it.",
        ('describe acme/support \'{"team": "support", "sampling": {"temperature": 0.2, "max_tokens": 300}}\'',),
        _flags,
        describe_adapter,
    ),
)
