"""Eviction from a full tier: one file per policy, whose name is the value of --adapter-eviction."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """`file.py` of this package holds `class Policy` with these methods. Owned by one tier; it has no lock."""

    def add(self, key: str, num_bytes: int, load_seconds: float) -> None:
        """Add a key, which counts as its first use. `load_seconds`: the cost of loading it again; 0: not known."""

    def use(self, key: str) -> None:
        """Count a use of a present key."""

    def remove(self, key: str) -> None:
        """Remove a key that was not evicted."""

    def evict(self, key: str) -> None:
        """Remove a key that was evicted to make room."""

    def order(self) -> Iterator[str]:
        """Every key once, the least valuable first; the policy must not change while this is read."""


def create_policy(name: str) -> EvictionPolicy:
    """A new policy of file `name`; each tier has its own."""
    policy: EvictionPolicy = importlib.import_module(f"{__name__}.{name}").Policy()
    return policy
