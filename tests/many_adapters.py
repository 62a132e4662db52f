"""A catalog with very many ids, written in one commit: registering each would take its time for nothing."""

from __future__ import annotations

from msgspec.structs import replace

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import new_entry
from lora_serve.adapters.catalog.entry import VersionEntry
from lora_serve.adapters.catalog.ledger import Changes
from lora_serve.adapters.catalog.state import saved


def fill(catalog: Catalog, count: int, version: VersionEntry, tenants: int = 10) -> list[str]:
    """`count` ids like `version`, of a few tenants and sizes; returned by name. All name its digest."""
    changes: Changes = {}
    for number in range(count):
        tenant = f"tenant{number % tenants}"
        one = replace(version, rank=1 + number % 64, num_bytes=1000 + number * 7919 % count, created=1.7e9 + number)
        name = f"{tenant}/adapter-{number:05}"
        changes |= saved(new_entry(name, tenant, one, False, None))
    catalog.ledger.change(lambda state: (changes, None))
    return sorted(catalog.snapshot.names)
