"""`lora-serve adapters describe`: change an adapter's metadata, its defaults for requests among it."""

from __future__ import annotations

import argparse

from lora_serve.commands.adapters.card import metadata_text
from lora_serve.commands.flags import adapter_id, adapter_path, json_object
from lora_serve.commands.verb import Call, Verb


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", type=adapter_id, metavar="ID")
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
        "describe",
        "Change an adapter's metadata: notes of your own, and the defaults of requests that name it.",
        (
            'describe acme/support \'{"team": "support", "sampling": {"temperature": 0.2, "max_tokens": 300}}\'',
            'describe acme/support --merge \'{"sampling": {"temperature": 0.4}}\'',
        ),
        _flags,
        describe_adapter,
    ),
)
