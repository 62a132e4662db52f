"""The lag of the event loop is measured, and shown in the metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lora_serve.server.upkeep import LAG_INTERVAL as INTERVAL
from lora_serve.server.upkeep import probe, samples

NAME = "lora_serve_event_loop_lag_seconds"


def test_one_late_call_stands_for_all_that_were_due_meanwhile() -> None:
    assert samples(0.0, 0.1) == [0.0]
    assert samples(-0.1, 0.1) == [0.0]
    assert samples(0.35, 0.1) == pytest.approx([0.35, 0.25, 0.15, 0.05])
    assert len(samples(1e9, 0.1)) == 1000


async def test_loop_that_is_held_up_is_noticed() -> None:
    seen: list[float] = []
    probing = asyncio.create_task(probe(seen.append, interval=0.01))
    await asyncio.sleep(0)
    time.sleep(0.3)
    async with asyncio.timeout(10):
        while not seen:
            await asyncio.sleep(0.005)
    probing.cancel()
    assert seen[0] >= 0.28
    assert len(seen) >= 28


async def test_lag_is_a_metric(http: aiohttp.ClientSession, house: Any) -> None:
    async with asyncio.timeout(20):
        while (await _figures(http))[f"{NAME}_count"] < 3:
            await asyncio.sleep(INTERVAL)
    before = await _figures(http)
    time.sleep(0.4)
    async with asyncio.timeout(20):
        while (await _figures(http))[f"{NAME}_sum"] < before[f"{NAME}_sum"] + 2:  # 0.4 + 0.38 + 0.36 + ...
            await asyncio.sleep(INTERVAL)


async def _figures(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    return {sample.name: sample.value for family in families for sample in family.samples if family.name == NAME}
