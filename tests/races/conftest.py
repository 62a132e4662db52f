"""The canaries' world, for races."""

from __future__ import annotations

from tests.canary.fixtures import canaries, world

__all__ = ["canaries", "world"]
