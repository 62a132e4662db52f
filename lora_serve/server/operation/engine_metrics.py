"""GET /metrics: the web's counters and one snapshot of the engine, in text format 0.0.4."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from lora_serve.core.errors import LoraServeError
from lora_serve.core.stats import EngineStats, EvictionReason, TierStats
from lora_serve.server.operation.metric_names import may_read_names, without_names
from lora_serve.server.services import SERVICES
from lora_serve.server.telemetry.metrics import Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_ADAPTERS_LISTED = 1000  # names in a label of vllm:lora_requests_info


async def get_metrics(request: web.Request) -> web.StreamResponse:
    """A dead engine takes only its own figures away."""
    services = request.app[SERVICES]
    try:
        stats = await services.client.stats()
    except LoraServeError:
        stats = None
    catalog = services.catalog
    registry = (
        *registry_families(catalog.snapshot.position.generation, catalog.is_away),
        _gauge("lora_serve_store_writable", "0 while the store cannot be written.", {}, services.store_problem is None),
    )
    scrape = Scrape(services.metrics, stats, await services.store_tiers(), registry, names=may_read_names(request))
    text = generate_latest(scrape)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


class Scrape(Collector):
    """One scrape: all families, without prometheus_client's `_created` series."""

    def __init__(
        self,
        metrics: Metrics,
        stats: EngineStats | None,
        store_tiers: Mapping[str, TierStats],
        registry: Sequence[Metric] = (),
        *,
        names: bool = True,
    ) -> None:
        """`stats` None: the engine is dead. `store_tiers`: those that the engine does not own.

        Without `names`, tenants and adapters are added up.
        """
        self._names = names
        self._registry = registry
        self._metrics = metrics
        self._stats = stats
        self._tiers = {**(stats.tiers if stats else {}), **store_tiers}

    def collect(self) -> Iterator[Metric]:
        return self._families() if self._names else without_names(self._families())

    def _families(self) -> Iterator[Metric]:
        for family in self._metrics.registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        if self._stats is not None:
            yield from engine_families(self._stats, self._metrics.labels)
        yield from tier_families(self._tiers)
        yield from self._registry


def registry_families(generation: int, is_away: bool) -> Iterator[Metric]:
    """How current this server's knowledge of the adapters is."""
    yield _gauge("lora_serve_registry_generation", "Commits of the adapter registry known here.", {}, generation)
    yield _gauge("lora_serve_registry_away", "1 while the shared adapter registry cannot be reached.", {}, is_away)


def engine_families(stats: EngineStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """vLLM's gauges, and our own of batches."""
    used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
    yield _gauge("vllm:num_requests_running", "Rows in the batch.", labels, stats.num_running)
    yield _gauge("vllm:num_requests_waiting", "Sequences that wait.", labels, stats.num_waiting)
    yield _gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", labels, used)
    yield _counter("vllm:num_preemptions", "Sequences set back to make room.", labels, stats.num_preemptions)
    yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", labels, stats.num_prefix_queries)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found.", labels, stats.num_prefix_hits)
    cache = {**labels, "block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
    yield _gauge("vllm:cache_config_info", "The KV cache's shape.", cache, 1)
    yield lora_requests_info(stats)
    yield _counter("lora_serve_adapter_loads_hung", "Loads given up as the store hangs.", {}, stats.num_hung_loads)
    yield from _batch_families(stats)


def lora_requests_info(stats: EngineStats) -> Metric:
    """One sample whose value is the time, as in vLLM: names of the adapters on the device, and of those awaited."""
    labels = {
        "max_lora": str(stats.max_loras),
        "running_lora_adapters": _names(stats.running_adapters),
        "waiting_lora_adapters": _names(stats.waiting_adapters),
    }
    return _gauge("vllm:lora_requests_info", "Adapters on the device and adapters waited for.", labels, time.time())


def _names(names: Iterable[str]) -> str:
    return ",".join(sorted(set(names))[:MAX_ADAPTERS_LISTED])


def tier_families(tiers: Mapping[str, TierStats]) -> Iterator[Metric]:
    """Each family once, with a sample per tier; what a tier does not know is left out."""
    counts = {
        name: CounterMetricFamily(f"lora_serve_adapter_{name}", f"Adapter {name} per tier.", labels=["tier"])
        for name in ("hits", "misses", "loads")
    }
    evictions = CounterMetricFamily(
        "lora_serve_adapter_evictions", "Adapter evictions per tier and reason.", labels=["tier", "reason"]
    )
    seconds = SummaryMetricFamily("lora_serve_adapter_load_seconds", "Seconds per load into the tier.", labels=["tier"])
    gauges = {
        "num_bytes": GaugeMetricFamily("lora_serve_adapter_bytes", "Bytes of adapters in the tier.", labels=["tier"]),
        "budget_bytes": GaugeMetricFamily(
            "lora_serve_adapter_budget_bytes", "Bytes that the tier may hold; 0: no limit.", labels=["tier"]
        ),
        "num_items": GaugeMetricFamily("lora_serve_adapter_count", "Adapters in the tier.", labels=["tier"]),
    }
    for tier, figures in tiers.items():
        for name, family in counts.items():
            family.add_metric([tier], getattr(figures, name))
        for reason in EvictionReason:
            evictions.add_metric([tier, reason], figures.eviction_reasons.get(reason, 0))
        for name, gauge in gauges.items():
            if (value := getattr(figures, name)) is not None:
                gauge.add_metric([tier], value)
        seconds.add_metric([tier], figures.loads, figures.load_seconds)
    yield from (*counts.values(), evictions, *gauges.values(), seconds)


def _batch_families(stats: EngineStats) -> Iterator[Metric]:
    """Means over the last batches, which the engine remembers."""
    batches = stats.recent_batches
    count = max(1, len(batches))
    rows = sum(batch.num_rows for batch in batches) / count
    adapters = sum(batch.num_adapters for batch in batches) / count
    seconds = sum(batch.seconds for batch in batches) / count
    yield _gauge("lora_serve_batch_rows", "Rows per batch, mean of the last batches.", {}, rows)
    yield _gauge("lora_serve_batch_adapters", "Adapters per batch, mean of the last batches.", {}, adapters)
    yield _gauge("lora_serve_step_seconds", "Seconds per step, mean of the last batches.", {}, seconds)


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
