"""Counters and histograms of requests, under vLLM's names. At a scrape operation/metrics.py adds the engine's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from lora_serve.core.messages import Timings

MAX_TENANT_LABELS = 200
OTHER_TENANTS = "other"
REFUSAL_REASONS = ("queue_requests", "queue_tokens", "tenant_requests", "tenant_tokens")  # shown from the start
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKEN_BUCKETS = tuple(count * 10**power for power in range(6) for count in (1, 2, 5))
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class Metrics:
    """The registry of one application, so that two applications in one process do not add up."""

    def __init__(self, model_name: str, max_tenants: int = MAX_TENANT_LABELS) -> None:
        """`max_tenants`: how many tenants get series of their own."""
        self._max_tenants = max_tenants
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            [*self.labels, "finished_reason"],
            registry=self.registry,
        )
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds", "Token to next token.", ITL_BUCKETS)
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", "Time in the queue.", REQUEST_BUCKETS)
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token.", REQUEST_BUCKETS
        )
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", REQUEST_BUCKETS
        )
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", TOKEN_BUCKETS)
        self.answer_length = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated per request.", TOKEN_BUCKETS
        )
        ProcessCollector(registry=self.registry)
        self._tenant_tokens = self._tenant_counter("lora_serve_tenant_tokens", "Prompt and generated tokens.")
        self._tenant_requests = self._tenant_counter("lora_serve_tenant_requests", "Sequences asked for.")
        self._refused = Counter(
            "lora_serve_requests_refused",
            "Requests told to come again later, by what was short.",
            ["reason"],
            registry=self.registry,
        )
        self.engine_restarts = Counter(
            "lora_serve_engine_restarts", "Times the engine was lost and started again.", registry=self.registry
        )
        self.loop_lag = Histogram(
            "lora_serve_event_loop_lag_seconds",
            "How late the event loop calls what is due.",
            buckets=LAG_BUCKETS,
            registry=self.registry,
        )
        self._tenants: set[str] = set()
        for reason in ("stop", "length", "abort"):
            self._success.labels(**self.labels, finished_reason=reason)
        for reason in REFUSAL_REASONS:
            self._refused.labels(reason)

    def sequence(self, tenant: str, arrival: float, num_prompt_tokens: int) -> SequenceTimer:
        """A timer for one sequence. `arrival`: seconds of `time.monotonic()`."""
        return SequenceTimer(self, self._tenant_label(tenant), arrival, num_prompt_tokens)

    @property
    def num_engine_restarts(self) -> int:
        """The value of `engine_restarts`."""
        return int(self.registry.get_sample_value("lora_serve_engine_restarts_total") or 0)

    def count_refusal(self, reason: str) -> None:
        """Count a request that was told to come again later. `reason`: of its CapacityError."""
        self._refused.labels(reason).inc()

    def count_start(self, tenant_label: str) -> None:
        self._tenant_requests.labels(tenant_label).inc()

    def count_end(self, tenant_label: str, num_tokens: int, reason: str) -> None:
        self._tenant_tokens.labels(tenant_label).inc(num_tokens)
        self._success.labels(**self.labels, finished_reason=reason).inc()

    def _tenant_label(self, tenant: str) -> str:
        """The tenant's name while there are few, so that no caller can grow the series without bound.

        A tenant that has a series keeps it: a counter that changed its name would seem to fall.
        """
        if tenant not in self._tenants and len(self._tenants) >= self._max_tenants:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self.labels), registry=self.registry).labels(**self.labels)

    def _tenant_counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["tenant"], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, list(self.labels), buckets=buckets, registry=self.registry).labels(**self.labels)


class SequenceTimer:
    """Counts one sequence; one that leaves the `with` block without `finished` counts as aborted."""

    def __init__(self, metrics: Metrics, tenant_label: str, arrival: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._tenant_label = tenant_label
        self._arrival = arrival
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0  # prompt and answer
        self._first_token = 0.0
        self._last_token: float | None = None
        self._is_over = False

    def __enter__(self) -> SequenceTimer:
        self._metrics.count_start(self._tenant_label)
        return self

    def admitted(self, timings: Timings) -> None:
        """The prompt is computed."""
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
        self._num_tokens = self._num_prompt_tokens
        self._metrics.queue_time.observe(timings.queue)
        self._metrics.prefill_time.observe(timings.prefill)
        self._metrics.prompt_length.observe(self._num_prompt_tokens)

    def pooled(self) -> None:
        """The answer came: one vector, and no token."""
        self._metrics.first_token.observe(time.monotonic() - self._arrival)

    def token(self) -> None:
        """A token came."""
        now = time.monotonic()
        self._metrics.generation_tokens.inc()
        self._num_tokens += 1
        if self._last_token is None:
            self._first_token = now
            self._metrics.first_token.observe(now - self._arrival)
        else:
            self._metrics.inter_token.observe(now - self._last_token)
        self._last_token = now

    def finished(self, reason: str) -> None:
        """The sequence ended; only the first end counts."""
        if not self._is_over:
            self._is_over = True
            self._metrics.count_end(self._tenant_label, self._num_tokens, reason)
            self._metrics.latency.observe(time.monotonic() - self._arrival)
            if self._last_token is not None:
                self._metrics.decode_time.observe(self._last_token - self._first_token)
                self._metrics.answer_length.observe(self._num_tokens - self._num_prompt_tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finished("abort")


class LogFigures(Protocol):
    """Counts of the server's own process since its start; an engine's process writes them into its own log."""

    @property
    def num_dropped(self) -> int:
        """Records that found the log's queue full."""

    @property
    def num_held_back(self) -> int:
        """Records that were summed up with others like them."""


class LogMetrics(Collector):
    """Counts what the log leaves out, so that an operator who misses a line finds that there was one."""

    def __init__(self, log: LogFigures) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("dropped", "Log records for which there was no room.", self._log.num_dropped),
            ("held_back", "Log records summed up as repeats of others.", self._log.num_held_back),
        ):
            yield CounterMetricFamily(f"lora_serve_log_records_{name}", text, value=value)
