"""One server for the tests of a file."""

from __future__ import annotations

from tests.canary.fixtures import canaries, house, house_settings, known_world, world

__all__ = ["canaries", "house", "house_settings", "known_world", "world"]
