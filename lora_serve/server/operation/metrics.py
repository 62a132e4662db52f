"""GET /metrics: the counters of requests and one snapshot of the engine.

The text format is always 0.0.4: under OpenMetrics negotiation prometheus_client would rename `vllm:x`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from lora_serve.core.errors import AuthenticationError, ForbiddenError, LoraServeError
from lora_serve.core.stats import STEP_TOKENS, EngineStats, EvictionReason, SpeculationStats, TierStats
from lora_serve.server.fleet import replicas_of
from lora_serve.server.guards.access import authenticated
from lora_serve.server.operation.fleet_metrics import fleet_families, kv_usage
from lora_serve.server.services import SERVICES, Services
from lora_serve.server.telemetry.metrics import OTHER_TENANTS, Metrics
from lora_serve.tenancy.authentication.authenticator import Authenticator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_ADAPTERS_LISTED = 1000  # names in a label of vllm:lora_requests_info
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
    try:
        stats = await services.client.stats()
    except LoraServeError:
        stats = None
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
    """True if the answer may name tenants and adapters, by --metrics-names: to everybody, or to the admin key and
    keys of the role metrics.

    A wrong key is no error, as probes send none, but too many of them are: WrongKeysError.
    """
    services = request.app[SERVICES]
    wanted = services.config.metrics_names
    if wanted == "open" or (wanted == "auto" and not services.authenticator.required):
        return True
    try:
        authenticated(request, Authenticator.metrics)
    except (AuthenticationError, ForbiddenError):
        return False
    return True


def names_note(services: Services) -> str | None:
    """A line for the log where scrapers without a key read no names: routers that know LoRA would quietly go blind."""
    wanted = services.config.metrics_names
    if wanted == "open" or (wanted == "auto" and not services.authenticator.required):
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
    yield _gauge("vllm:num_requests_running", "Rows in the batch.", stats.num_running, labels)
    yield _gauge("vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting, labels)
    yield _gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", kv_usage(stats), labels)
    yield _counter("vllm:num_preemptions", "Sequences set back to make room.", stats.num_preemptions, labels)
    yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_queries, labels)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found.", stats.num_prefix_hits, labels)
    yield _step_tokens(stats, labels)
    cache = {**labels, "block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
    yield _gauge("vllm:cache_config_info", "The KV cache's shape.", 1, cache)
    yield lora_requests_info(stats)
    yield from grammar_families(stats)
    if stats.speculation.most:
        yield from speculation_families(stats.speculation, labels)
    yield _counter("lora_serve_adapter_loads_hung", "Loads given up as the store hangs.", stats.num_hung_loads)
    batches = stats.recent_batches
    for name, text, values in (
        ("lora_serve_batch_rows", "Rows per batch", [batch.num_rows for batch in batches]),
        ("lora_serve_batch_adapters", "Adapters per batch", [batch.num_adapters for batch in batches]),
        ("lora_serve_step_seconds", "Seconds per step", [batch.seconds for batch in batches]),
    ):
        yield _gauge(name, f"{text}, mean of the last batches.", sum(values) / max(1, len(values)))


def grammar_families(stats: EngineStats) -> Iterator[Metric]:
    """Rows that obey a grammar, and what their grammars cost."""
    found = stats.constraints
    yield _gauge("lora_serve_grammar_rows", "Rows in the batch that obey a grammar.", stats.num_constrained)
    yield _counter("lora_serve_grammar_forced_tokens", "Tokens that no step sampled.", stats.num_forced)
    yield _counter("lora_serve_grammar_masks", "Masks, one for each token of such a row.", found.num_masks)
    text = "Seconds of computing masks, beside the forward pass."
    yield _counter("lora_serve_grammar_mask_seconds", text, found.mask_seconds)
    text = "Seconds that steps waited for masks after the forward pass."
    yield _counter("lora_serve_grammar_wait_seconds", text, found.wait_seconds)
    yield _counter("lora_serve_grammar_compilations", "Grammars compiled.", found.num_compiled)
    yield _counter("lora_serve_grammar_compile_seconds", "Seconds of compiling grammars.", found.compile_seconds)


def speculation_families(found: SpeculationStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """vLLM's counters of guessed tokens, which it too has only where tokens are guessed."""
    yield _counter("vllm:spec_decode_num_drafts", "Drafts run.", found.num_drafts, labels)
    yield _counter("vllm:spec_decode_num_draft_tokens", "Guessed tokens run.", found.num_drafted, labels)
    yield _counter("vllm:spec_decode_num_accepted_tokens", "Guessed tokens accepted.", found.num_accepted, labels)
    places = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Guessed tokens accepted, by their place in the draft.",
        labels=[*labels, "position"],
    )
    for place, count in enumerate(found.accepted_by_place):
        places.add_metric([*labels.values(), str(place)], count)
    yield places


def _step_tokens(stats: EngineStats, labels: Mapping[str, str]) -> Metric:
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per engine step.", labels=list(labels))
    sums = list(accumulate(stats.steps_by_tokens)) or [0] * (len(STEP_TOKENS) + 1)
    bounds = [*(f"{float(bound)}" for bound in STEP_TOKENS), "+Inf"]
    family.add_metric(list(labels.values()), list(zip(bounds, sums, strict=True)), stats.num_step_tokens)
    return family


def lora_requests_info(stats: EngineStats) -> Metric:
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


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family
