"""One server for the tests of a file, and canaries that sing from the first of them to the last."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.canary.asking import Canaries
from tests.canary.fixtures import canaries, house, house_settings, known_world, world
from tests.canary.house import House
from tests.canary.loop_lag import LIMIT
from tests.canary.watch import Watch, watching
from tests.tiers import is_search

__all__ = ["canaries", "house", "house_settings", "known_world", "watched", "world"]


@pytest.fixture(scope="module", autouse=True)
def watched(house: House, canaries: Canaries) -> Iterator[Watch]:
    """What the canaries noticed fails the last test of the file; and so does a lag beyond what a busy machine adds, as
    no second attempt is made here.
    """
    with watching(house, canaries, pause=0.4, max_lag=4 * LIMIT) as watch:
        yield watch


@pytest.fixture(scope="module", autouse=True)
def what_lived_before() -> None:
    """Left out of the collections below: late in the suite a worker holds millions of objects, a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def garbage_of_a_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collected by the thread that made it: the 200 000 objects that Hypothesis leaves in cycles would be collected by
    whichever thread is next, and take 0.2 s of a turn of the house's event loop.
    """
    yield
    if is_search(request.node):
        gc.collect()
