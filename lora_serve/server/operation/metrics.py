"""GET /metrics: the counters of requests and one snapshot of the engine.

The text format is always 0.0.4: under OpenMetrics negotiation prometheus_client would rename `vllm:x`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from lora_serve.core.errors import AuthenticationError, ForbiddenError
from lora_serve.core.figures import COUNTS, EvictionReason, MetricName, TierStats, marks_of
from lora_serve.core.stats import STEP_TOKENS, EngineStats, ReplicaState, ReplicaStats, SpeculationStats
from lora_serve.server.middleware import authenticated
from lora_serve.server.services import SERVICES, Services, replicas_of
from lora_serve.server.telemetry.metrics import OTHER_TENANTS, Metrics
from lora_serve.tenancy.authenticator import Authenticator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_ADAPTERS_LISTED = 1000  # names in a label of vllm:lora_requests_info
MAX_REPLICAS_LISTED = 256  # each has its own series; `lora_serve_replicas` counts all
_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
_UNLABELLED: Mapping[str, str] = {}
# The replacements of names. Samples that have one of these labels are added up.
_INSTEAD = {
    "tenant": OTHER_TENANTS, "adapter": OTHER_TENANTS, "running_lora_adapters": "", "waiting_lora_adapters": "",
    "neighbour": "",
}  # fmt: skip


async def get_metrics(request: web.Request) -> web.StreamResponse:
    """Metrics in Prometheus' text format.

    A dead engine takes only its own figures away.
    """
    services = request.app[SERVICES]
    stats = await services.engine_stats()
    catalog, is_writable = services.catalog, services.store_problem is None
    others = (
        _gauge("lora_serve_waiting_tokens", "Prompt tokens that wait.", services.client.gate.num_tokens),
        _gauge(
            "lora_serve_registry_generation",
            "Commits of the adapter registry known here.",
            catalog.snapshot.position.generation,
        ),
        _gauge("lora_serve_registry_away", "1 while the shared adapter registry cannot be reached.", catalog.is_away),
        _gauge(
            "lora_serve_unreadable_records",
            "Adapters, aliases, tenants and keys whose records cannot be read: their names are held.",
            len(catalog.snapshot.held) + len(services.keys.directory.snapshot.held),
        ),
        _gauge("lora_serve_store_writable", "0 while the store cannot be written.", is_writable),
        *fleet_families(replicas_of(services, stats), 0 if stats is None else stats.num_replicas_lost),
    )
    scrape = Scrape(services.metrics, stats, await services.store_tiers(), others, names=may_read_names(request))
    return web.Response(body=generate_latest(scrape), headers={"Content-Type": CONTENT_TYPE})


def may_read_names(request: web.Request) -> bool:
    """True if the answer may name tenants and adapters, by --metrics-names: to all callers, or to the admin key and
    keys of the role metrics.

    A wrong key is no error, as probes send none, but too many of them are: WrongKeysError.
    """
    services = request.app[SERVICES]
    if _names_are_open(services):
        return True
    try:
        authenticated(request, Authenticator.metrics)
    except (AuthenticationError, ForbiddenError):
        return False
    return True


def _names_are_open(services: Services) -> bool:
    wanted = services.config.metrics_names
    return wanted == "open" or (wanted == "auto" and not services.authenticator.required)


def names_note(services: Services) -> str | None:
    """A line for the log where scrapers without a key read no names: routers that know LoRA would quietly go blind."""
    if _names_are_open(services):
        return None
    return (
        "/metrics names adapters only for a key: without one vllm:lora_requests_info shows none, and a router that "
        "picks servers by adapter sees nothing. Give it a key of the role metrics (lora-serve keys create TENANT "
        "--role metrics), or start with --metrics-names open"
    )


class Scrape(Collector):
    """All families of one scrape, without prometheus_client's `_created` series."""

    def __init__(
        self,
        metrics: Metrics,
        stats: EngineStats | None,
        store_tiers: Mapping[str, TierStats],
        others: Sequence[Metric] = (),
        *,
        names: bool = True,
    ) -> None:
        """`stats` None: the engine is dead. `store_tiers`: the tiers that the engine does not own. Without `names`
        tenants and adapters are added up.
        """
        self._names = names
        self._others = others
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
        yield from self._others


def without_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """The same families and sums, without the names of tenants and adapters and without how many there are."""
    for family in families:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
        for sample in family.samples:
            labels = {label: _INSTEAD.get(label, value) for label, value in sample.labels.items()}
            key = (sample.name, tuple(sorted(labels.items())))
            known = sums.get(key)
            value = sample.value + (known.value if known else 0)
            sums[key] = (known or sample)._replace(labels=labels, value=value)
        family.samples = list(sums.values())
        yield family


def engine_families(stats: EngineStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """vLLM's gauges, and our own of batches: means over the last batches, which the engine remembers."""
    yield from _named(stats, ("num_running", "num_waiting"), labels)
    yield _gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", _kv_usage(stats), labels)
    yield from _named(stats, ("num_preemptions", "num_prefix_queries", "num_prefix_hits"), labels)
    yield _step_tokens(stats, labels)
    cache = {**labels, "block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
    yield _gauge("vllm:cache_config_info", "The KV cache's shape.", 1, cache)
    yield _lora_requests_info(stats)
    yield from _named(stats, ("num_constrained", "num_forced"))
    costs = ("num_masks", "mask_seconds", "wait_seconds", "num_compiled", "compile_seconds")
    yield from _named(stats.constraints, costs)
    if stats.speculation.most:
        yield from _speculation_families(stats.speculation, labels)
    graphs = ("num_replayed", "num_captured", "num_failed", "capture_seconds", "compile_seconds")
    yield from _named(stats.graphs, graphs)
    yield from _named(stats, ("num_hung_loads",))
    batches = stats.recent_batches
    for name, text, values in (
        ("lora_serve_batch_rows", "Rows per batch", [batch.num_rows for batch in batches]),
        ("lora_serve_batch_adapters", "Adapters per batch", [batch.num_adapters for batch in batches]),
        ("lora_serve_step_seconds", "Seconds per step", [batch.seconds for batch in batches]),
    ):
        yield _gauge(name, f"{text}, mean of the last batches.", sum(values) / max(1, len(values)))


def _speculation_families(found: SpeculationStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """vLLM's counters of guessed tokens, which it too has only where tokens are guessed."""
    yield from _named(found, ("num_drafts", "num_drafted", "num_accepted"), labels)
    name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Guessed tokens accepted, by their place in the draft."
    yield _by("position", CounterMetricFamily, name, text, enumerate(found.accepted_by_place), labels)


def _step_tokens(stats: EngineStats, labels: Mapping[str, str]) -> Metric:
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per engine step.", labels=list(labels))
    sums = list(accumulate(stats.steps_by_tokens)) or [0] * (len(STEP_TOKENS) + 1)
    bounds = [*(f"{float(bound)}" for bound in STEP_TOKENS), "+Inf"]
    family.add_metric(list(labels.values()), list(zip(bounds, sums, strict=True)), stats.num_step_tokens)
    return family


def _lora_requests_info(stats: EngineStats) -> Metric:
    """One sample whose value is the time, as in vLLM: names of the adapters on the device, and of those awaited."""
    labels = {
        "max_lora": str(stats.max_loras),
        "running_lora_adapters": _names(stats.running_adapters),
        "waiting_lora_adapters": _names(stats.waiting_adapters),
    }
    return _gauge("vllm:lora_requests_info", "Adapters on the device and adapters waited for.", time.time(), labels)


def _names(names: Iterable[str]) -> str:
    return ",".join(sorted(set(names))[:MAX_ADAPTERS_LISTED])


def tier_families(tiers: Mapping[str, TierStats]) -> Iterator[Metric]:
    """Each family once, with a sample per tier that knows the figure."""

    def of_each(names: Iterable[str]) -> Iterator[Metric]:
        for name in names:
            values = ((tier, getattr(figures, name)) for tier, figures in tiers.items())
            yield _by("tier", *_declared(TierStats, name), values)

    yield from of_each(("hits", "misses", "loads"))
    evictions = CounterMetricFamily(
        "lora_serve_adapter_evictions", "Adapter evictions per tier and reason.", labels=["tier", "reason"]
    )
    seconds = SummaryMetricFamily("lora_serve_adapter_load_seconds", "Seconds per load into the tier.", labels=["tier"])
    for tier, figures in tiers.items():
        for reason in EvictionReason:
            evictions.add_metric([tier, reason], figures.eviction_reasons.get(reason, 0))
        seconds.add_metric([tier], figures.loads, figures.load_seconds)
    yield evictions
    yield from of_each(("num_bytes", "budget_bytes", "num_items"))
    yield seconds


def _kv_usage(stats: EngineStats) -> float:
    """The part of the KV blocks that is in use."""
    return 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


# Of each replica; the metrics without the label `replica` are their sums.
_OF_REPLICAS: tuple[tuple[_Family, str, str, Callable[[EngineStats], float]], ...] = (
    (GaugeMetricFamily, "running", "Rows in the batch", lambda stats: stats.num_running),
    (GaugeMetricFamily, "waiting", "Sequences that wait", lambda stats: stats.num_waiting),
    (GaugeMetricFamily, "waiting_tokens", "Prompt tokens still to be computed", lambda stats: stats.num_waiting_tokens),
    (GaugeMetricFamily, "kv_cache_usage", "KV blocks in use", _kv_usage),
    (GaugeMetricFamily, "adapters", "Adapters on the device", lambda stats: len(stats.slots)),
    (GaugeMetricFamily, "max_adapters", "Device slots", lambda stats: stats.max_loras),
    (CounterMetricFamily, "adapter_loads", "Adapters brought onto the device", lambda stats: _device(stats, "loads")),
    (
        CounterMetricFamily, "adapter_evictions", "Adapters that left the device",
        lambda stats: _device(stats, "evictions"),
    ),
    (CounterMetricFamily, "steps", "Steps run", lambda stats: stats.num_steps),
)  # fmt: skip


def fleet_families(replicas: Sequence[ReplicaStats], num_lost: int) -> Iterator[Metric]:
    """Replicas by state, and the figures of each. `num_lost`: since the server's start."""
    states = ((state, sum(replica.state is state for replica in replicas)) for state in ReplicaState)
    yield _by("state", GaugeMetricFamily, "lora_serve_replicas", "Engine replicas, by state.", states)
    name, text = "lora_serve_replicas_lost", "Engine replicas of a fleet that were lost."
    yield _one(CounterMetricFamily, name, text, num_lost, _UNLABELLED)
    listed = replicas[:MAX_REPLICAS_LISTED]
    name, text = "lora_serve_replica_ready", "1 while the replica takes new requests."
    ready = ((replica.replica, replica.state is ReplicaState.READY) for replica in listed)
    yield _by("replica", GaugeMetricFamily, name, text, ready)
    name, text = "lora_serve_replica_requests", "Sequences that this server has under way on the replica."
    yield _by("replica", GaugeMetricFamily, name, text, ((replica.replica, replica.num_requests) for replica in listed))
    with_stats = [(replica.replica, replica.stats) for replica in listed if replica.stats is not None]
    for family, name, text, figure in _OF_REPLICAS:
        end = "; 1 is all of them." if name == "kv_cache_usage" else "."
        values = ((replica, figure(stats)) for replica, stats in with_stats)
        yield _by("replica", family, f"lora_serve_replica_{name}", f"{text}, per replica{end}", values)


def _device(stats: EngineStats, name: str) -> int:
    tier = stats.tiers.get("device")
    return 0 if tier is None else getattr(tier, name)


def _named(figures: object, names: Iterable[str], labels: Mapping[str, str] = _UNLABELLED) -> Iterator[Metric]:
    """Figures under the names that their class declares."""
    for name in names:
        family, metric, text = _declared(type(figures), name)
        yield _one(family, metric, text, getattr(figures, name), labels)


def _declared(kind: type, name: str) -> tuple[_Family, str, str]:
    marks = marks_of(kind)[name]
    found = next(mark for mark in marks if isinstance(mark, MetricName))
    return CounterMetricFamily if COUNTS in marks else GaugeMetricFamily, found.name, found.text


def _by(
    label: str,
    family: _Family,
    name: str,
    text: str,
    values: Iterable[tuple[object, float | None]],
    labels: Mapping[str, str] = _UNLABELLED,
) -> Metric:
    """A family with a sample for each value of a label that knows the figure."""
    made = family(name, text, labels=[*labels, label])
    for of, value in values:
        if value is not None:
            made.add_metric([*labels.values(), str(of)], value)
    return made


def _one(family: _Family, name: str, text: str, value: float, labels: Mapping[str, str]) -> Metric:
    made = family(name, text, labels=list(labels))
    made.add_metric(list(labels.values()), value)
    return made


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] = _UNLABELLED) -> Metric:
    return _one(GaugeMetricFamily, name, text, value, labels)
