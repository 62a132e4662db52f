"""The order of waiting requests: one file per policy, its name is the value of --policy."""

from __future__ import annotations

import importlib
from typing import Protocol

from lora_serve.engine.sequence import Sequence


class Policy(Protocol):
    """`file.py` holds `class Policy` with this method."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """Waiting sequences are tried in ascending order; the key of a sequence never changes."""


def create_policy(name: str) -> Policy:
    """The policy of file `name`."""
    policy: Policy = importlib.import_module(f"{__name__}.{name}").Policy()
    return policy
