"""The canaries' world, for races."""

from __future__ import annotations

from tests.canary.fixtures import canaries, known_world, world

__all__ = ["canaries", "known_world", "world"]
