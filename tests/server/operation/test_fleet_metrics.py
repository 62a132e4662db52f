"""The label `replica` in /metrics: each engine's figures, and their sums under the names there always were."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lora_serve.core.stats import EMPTY, ReplicaState, ReplicaStats
from lora_serve.server.operation.metrics import MAX_REPLICAS_LISTED, fleet_families
from tests.server.fleets import REPLICAS, play_fleet


async def samples(http: aiohttp.ClientSession) -> dict[str, dict[str, float]]:
    """Sample name -> replica or state -> value."""
    async with http.get("/metrics") as answer:
        text = await answer.text()
    return by_label(text)


def by_label(text: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = sample.labels.get("replica") or sample.labels.get("state") or ""
            found.setdefault(sample.name, {})[label] = sample.value
    return found


async def test_one_engine_is_one_replica(http: aiohttp.ClientSession) -> None:
    found = await samples(http)
    assert found["lora_serve_replica_ready"] == {"0": 1}
    assert found["lora_serve_replicas"] == {"starting": 0, "ready": 1, "draining": 0, "refused": 0, "lost": 0}


async def test_figures_of_each_replica_and_their_sums(http: aiohttp.ClientSession, house: Any) -> None:
    home = await play_fleet(house)
    found = await samples(http)
    assert found["lora_serve_replica_adapters"] == {name: 1 + (name == home) for name in REPLICAS}
    assert found["lora_serve_replica_max_adapters"] == dict.fromkeys(REPLICAS, 4)
    for total, each in (
        ("vllm:num_requests_running", "lora_serve_replica_running"),
        ("vllm:num_requests_waiting", "lora_serve_replica_waiting"),
    ):
        assert sum(found[total].values()) == sum(found[each].values())
    assert found["lora_serve_replicas"]["ready"] == 3
    assert found["lora_serve_replicas_lost_total"] == {"": 0}


async def test_dead_engine_is_still_counted(
    http: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.engine.stop()
    house.services.lifecycle.fail("dead")
    found = await samples(http)
    assert found["lora_serve_replicas"]["lost"] == 1
    assert found["lora_serve_replica_ready"] == {"0": 0}


def test_series_are_bounded_and_all_are_counted() -> None:
    crowd = [
        ReplicaStats(f"r{number}", "n", ReplicaState.DRAINING, stats=EMPTY) for number in range(MAX_REPLICAS_LISTED + 9)
    ]

    class Fleet(CollectorRegistry):
        def collect(self) -> Any:
            return fleet_families(crowd, 5)

    found = by_label(generate_latest(Fleet()).decode())
    listed = {name: len(values) for name, values in found.items() if name.startswith("lora_serve_replica_")}
    assert len(listed) > 8
    assert set(listed.values()) == {MAX_REPLICAS_LISTED}
    assert found["lora_serve_replicas"]["draining"] == MAX_REPLICAS_LISTED + 9
    assert found["lora_serve_replicas_lost_total"] == {"": 5}
