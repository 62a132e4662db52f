"""The seam between a tier and the order in which its entries leave. MayDelete keys, bytes and seconds; no adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """`file.py` of this package holds `class Policy` with these methods. Owned by one tier; it has no lock."""

    def add(self, key: str, num_bytes: int, load_seconds: float) -> None:
        """A new key; that counts as its first use. `load_seconds`: to have it again; 0: not known."""

    def use(self, key: str) -> None:
        """One more use of a key that is here."""

    def remove(self, key: str) -> None:
        """It is gone for another reason than room."""

    def evict(self, key: str) -> None:
        """It is gone to make room."""

    def order(self) -> Iterator[str]:
        """Every key once, the one that is missed least first; the policy must not change before the last is read."""
