"""The two tiers of the suite: what the default one takes, and what only `pytest -m nightly` does (docs/testing.md).

A test marked `nightly` runs in the nightly tier alone. A search (a property test of Hypothesis, or one marked `search`)
runs in both, and is longer at night.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

T = TypeVar("T")

# The machine may be busy, and the fixtures used with @given hold no state between examples.
_STEADY = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
settings.register_profile("default", _STEADY, max_examples=40, derandomize=True, database=None)
settings.register_profile("nightly", _STEADY, max_examples=400)


def is_default(config: pytest.Config) -> bool:
    """True if the selected tests are those of the default tier."""
    return "not nightly" in config.option.markexpr


def is_search(item: pytest.Item) -> bool:
    """True if the test tries as many examples as its tier allows."""
    function = getattr(item, "obj", None)
    return getattr(function, "is_hypothesis_test", False) or item.get_closest_marker("search") is not None


def mostly_nightly(values: Iterable[object], *by_default: object) -> list[ParameterSet]:
    """All values for the nightly tier, those of `by_default` for the default one; a tuple has a value per parameter."""
    marks = {True: (), False: (pytest.mark.nightly,)}
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks[value in by_default])
        for value in values
    ]


def by_tier(default: T, nightly: T) -> T:
    """What a search does in the tier that runs."""
    return default if settings().derandomize else nightly


def num_examples() -> int:
    """How many examples a search of the tier tries, unless a test says otherwise."""
    return int(settings().max_examples)
