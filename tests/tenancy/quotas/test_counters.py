"""Counters in memory: of two minutes, and gone when nobody looks at them any more."""

from __future__ import annotations

import asyncio

import pytest

from lora_serve.tenancy.quotas import counters as rate_counters
from lora_serve.tenancy.quotas.counters import MemoryCounters


async def test_counts_are_those_of_a_minute_and_the_one_before() -> None:
    counters = MemoryCounters()
    assert await counters.add({"a": 5, "b": 1}, 10) == {"a": (0, 5), "b": (0, 1)}
    assert await counters.add({"a": -2}, 10) == {"a": (0, 3)}
    assert await counters.add({"a": 4}, 11) == {"a": (3, 4)}
    assert await counters.add({"a": 1}, 13) == {"a": (0, 1)}
    await counters.close()


async def test_counters_that_have_expired_are_looked_for_now_and_then_and_not_at_every_addition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = MemoryCounters()
    await counters.add({"first": 1}, 1)
    monkeypatch.setattr(rate_counters, "KEPT_SECONDS", 0)
    await counters.add({f"old-{number}": 1 for number in range(100)}, 2)
    first = counters._storage.timer
    await counters.add({"a": 1}, 3)
    assert counters._storage.timer is first
    monkeypatch.setattr(rate_counters, "_SWEEP", 0.0)
    await counters.add({"a": 1}, 3)
    while not counters._storage.timer.done():  # type: ignore[union-attr]
        await asyncio.sleep(0)
    assert not any(name.startswith("old-") for name in counters._storage.storage)
    assert "first:1" in counters._storage.storage
    await counters.close()
