"""Adapter versions for tests that need a name and a digest, and no weights."""

from __future__ import annotations

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.entry import VersionEntry


def digest(letter: str) -> str:
    """A digest of one letter."""
    return "sha256:" + letter * 64


def version(letter: str) -> VersionEntry:
    """A version with that digest; the catalog gives it its number."""
    return VersionEntry(0, digest(letter), 8, 1000, {"r": 8, "targets": ["q_proj"]}, "folder x", 1.5)


def held(catalog: Catalog) -> frozenset[str]:
    """Digests that somebody holds or deletes."""
    return catalog.change(lambda state: ({}, frozenset(state.leases)))
