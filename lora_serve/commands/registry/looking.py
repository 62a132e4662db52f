"""`lora-serve registry show | check`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from lora_serve.adapters.maintenance.integrity import BadBlob, Inventory, bad_blobs, inventory_of
from lora_serve.adapters.maintenance.registries import OpenRegistry, open_registry
from lora_serve.commands.output import Output, bytes_text, plain
from lora_serve.commands.registry.addresses import add_registry_flags, registry_address
from lora_serve.commands.registry.verb import Verb


def _show(flags: argparse.Namespace, output: Output) -> bool:
    with open_registry(registry_address(flags), is_source=True) as place:
        document = _document(place, inventory_of(place))
    output.show(document, _table(document))
    return True


def _document(place: OpenRegistry, stock: Inventory) -> dict[str, Any]:
    position = place.catalog.snapshot.position
    return {
        "object": "registry",
        "kind": "redis" if place.address.is_redis else "embedded",
        "place": place.address.text,
        "epoch": position.epoch,
        "generation": position.generation,
        "adapters": stock.num_adapters,
        "versions": stock.num_versions,
        "aliases": stock.num_aliases,
        "bytes": stock.num_bytes,
        "blobs": stock.num_blobs,
        "missing": list(stock.missing),
        "unnamed": list(stock.unnamed),
        "aside": list(stock.aside),
        "unreadable": list(place.unreadable),
    }


def _table(document: dict[str, Any]) -> Table:
    """A table of the lists' lengths, then their items."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in list(document.items())[1:]:
        shown = bytes_text(value) if name == "bytes" else value
        shown = ", ".join([str(len(value)), *value]) if isinstance(value, list) else shown
        table.add_row(name, plain(shown))
    return table


def _check(flags: argparse.Namespace, output: Output) -> bool:
    with open_registry(registry_address(flags), is_source=True) as place:
        with output.progress_of(f"check {place.address.text}") as on_progress:
            bad = list(bad_blobs(place, on_progress))
        num_blobs = len(place.catalog.snapshot.digests)
        unreadable, text = place.unreadable, place.address.text
    document = {
        "object": "registry.check",
        "place": text,
        "is_whole": not (bad or unreadable),
        "blobs": num_blobs,
        "bad": [{"digest": blob.digest, "problem": blob.problem, "named_by": list(blob.labels)} for blob in bad],
        "unreadable": list(unreadable),
    }
    output.show(document, f"{num_blobs} blobs in {plain(text)}: {num_blobs - len(bad)} sound, {len(bad)} not")
    output.note(*map(_complaint, bad), *(f"unreadable: {name}: its record makes no sense" for name in unreadable))
    return not (bad or unreadable)


def _complaint(blob: BadBlob) -> str:
    more = f" and {len(blob.labels) - 8} more" if len(blob.labels) > 8 else ""
    return f"{blob.problem}: {blob.digest}, named by {', '.join(blob.labels[:8])}{more}"


VERBS = (
    Verb(
        "show",
        "Say what a registry holds: where its journal is, adapters, versions, aliases, blobs missing or unnamed.",
        ("show", "show --redis-url redis://redis:6379/0 --json"),
        add_registry_flags,
        _show,
    ),
    Verb(
        "check",
        "Read and verify every blob that a version names; missing and corrupt ones are listed.",
        ("check --store /srv/lora_serve", "check --redis-url redis://redis:6379/0"),
        add_registry_flags,
        _check,
    ),
)
