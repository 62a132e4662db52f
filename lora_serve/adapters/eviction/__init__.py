"""Eviction from a full tier: one file per policy, whose name is the value of --adapter-eviction."""

from __future__ import annotations

import importlib

from lora_serve.adapters.eviction.base import EvictionPolicy


def create_policy(name: str) -> EvictionPolicy:
    """A new policy of file `name`; each tier has its own."""
    policy: EvictionPolicy = importlib.import_module(f"{__name__}.{name}").Policy()
    return policy
