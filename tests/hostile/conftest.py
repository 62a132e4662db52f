"""One server for the tests of a file, and canaries that sing from the first of them to the last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.canary.asking import Canaries
from tests.canary.fixtures import canaries, house, house_settings, world
from tests.canary.house import House
from tests.canary.loop_lag import LIMIT
from tests.canary.watch import Watch, watching

__all__ = ["canaries", "house", "house_settings", "watched", "world"]


@pytest.fixture(scope="module", autouse=True)
def watched(house: House, canaries: Canaries) -> Iterator[Watch]:
    """What the canaries noticed fails the last test of the file."""
    with watching(house, canaries, pause=0.4, max_lag=LIMIT) as watch:
        yield watch
