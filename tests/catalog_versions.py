"""Adapter versions for tests that need a name and a digest, and no weights; what such tests ask of a catalog."""

from __future__ import annotations

from typing import Any

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.entry import VersionEntry
from lora_serve.core.errors import AdapterUnavailableError


def digest(letter: str) -> str:
    """A digest of one letter."""
    return "sha256:" + letter * 64


def version(letter: str) -> VersionEntry:
    """A version with that digest; the catalog gives it its number."""
    return VersionEntry(0, digest(letter), 8, 1000, {"r": 8, "targets": ["q_proj"]}, "folder x", 1.5)


def lose_answers(catalog: Catalog, patched: pytest.MonkeyPatch) -> None:
    """Commits are made, and nobody hears of it."""
    commit = catalog.ledger.journal.commit

    def lost(*arguments: Any) -> None:
        commit(*arguments)
        raise AdapterUnavailableError("lost")

    patched.setattr(catalog.ledger.journal, "commit", lost)


def held(catalog: Catalog) -> frozenset[str]:
    """Digests that somebody holds or deletes."""
    return catalog.ledger.change(lambda state: ({}, frozenset(state.leases)))
