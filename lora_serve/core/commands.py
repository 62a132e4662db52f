"""Residency commands for the engine: what the admin may ask of the adapter tiers."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.adapter import AdapterRef


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring the adapter onto the device if a slot is free or evictable; done when it is there."""

    adapter: AdapterRef


@dataclass(frozen=True, slots=True)
class Pin:
    """Prefetch, and never evict until unpinned."""

    adapter: AdapterRef


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let it be evicted again."""

    digest: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop it from device and host once no row holds it."""

    digest: str
    forget: bool = False  # its figures too: it is deleted, not only moved out


AdapterCommand = Prefetch | Pin | Unpin | Evict
