"""The engines behind this server in /metrics, one by one: the metrics without the label `replica` are their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lora_serve.core.stats import EngineStats, ReplicaState, ReplicaStats

MAX_REPLICAS_LISTED = 256  # each has its own series; `lora_serve_replicas` counts all


def kv_usage(stats: EngineStats) -> float:
    """The part of the KV blocks that is in use."""
    return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("running", "Rows in the batch, per replica.", lambda stats: stats.num_running),
    ("waiting", "Sequences that wait, per replica.", lambda stats: stats.num_waiting),
    ("waiting_tokens", "Prompt tokens still to be computed, per replica.", lambda stats: stats.num_waiting_tokens),
    ("kv_cache_usage", "KV blocks in use, per replica; 1 is all of them.", kv_usage),
    ("adapters", "Adapters on the device, per replica.", lambda stats: len(stats.slots)),
    ("max_adapters", "Device slots, per replica.", lambda stats: stats.max_loras),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("adapter_loads", "Adapters brought onto the device, per replica.", lambda stats: _on_device(stats)[0]),
    ("adapter_evictions", "Adapters that left the device, per replica.", lambda stats: _on_device(stats)[1]),
    ("steps", "Steps run, per replica.", lambda stats: stats.num_steps),
)


def fleet_families(replicas: Sequence[ReplicaStats], num_lost: int) -> Iterator[Metric]:
    """Replicas by state, and the figures of each. `num_lost`: since the server's start."""
    by_state = GaugeMetricFamily("lora_serve_replicas", "Engine replicas, by state.", labels=["state"])
    for state in ReplicaState:
        by_state.add_metric([state], sum(replica.state is state for replica in replicas))
    lost = CounterMetricFamily("lora_serve_replicas_lost", "Engine replicas of a fleet that were lost.")
    lost.add_metric([], num_lost)
    yield from (by_state, lost)
    listed = list(islice(replicas, MAX_REPLICAS_LISTED))
    ready = _gauge("ready", "1 while the replica takes new requests.")
    requests = _gauge("requests", "Sequences that this server has under way on the replica.")
    for replica in listed:
        ready.add_metric([replica.replica], replica.state is ReplicaState.READY)
        requests.add_metric([replica.replica], replica.num_requests)
    yield from (ready, requests)
    told = [(replica.replica, replica.stats) for replica in listed if replica.stats is not None]
    for name, text, figure in _GAUGES:
        yield _filled(_gauge(name, text), told, figure)
    for name, text, figure in _COUNTERS:
        yield _filled(CounterMetricFamily(f"lora_serve_replica_{name}", text, labels=["replica"]), told, figure)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"lora_serve_replica_{name}", text, labels=["replica"])


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    told: Sequence[tuple[str, EngineStats]],
    figure: Callable[[EngineStats], float],
) -> Metric:
    for replica, stats in told:
        family.add_metric([replica], figure(stats))
    return family


def _on_device(stats: EngineStats) -> tuple[int, int]:
    tier = stats.tiers.get("device")
    return (0, 0) if tier is None else (tier.loads, tier.evictions)
