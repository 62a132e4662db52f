"""Counters and histograms of requests, under vLLM's names. At a scrape operation/metrics.py adds the engine's."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from lora_serve.adapters.catalog.entry import Route
from lora_serve.core.messages import Timings

MAX_TENANT_LABELS = 200
OTHER_TENANTS = "other"
REFUSAL_REASONS = ("queue_requests", "queue_tokens", "tenant_requests", "tenant_tokens")  # shown from the start
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKEN_BUCKETS = tuple(count * 10**power for power in range(6) for count in (1, 2, 5))
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP = 5  # seconds that are counted together
MINUTE = 60
WINDOW = 300  # seconds in which errors and shares are counted
MAX_KNOWN = 40_000  # versions and tenants of which the last answer is known: some megabytes


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
        """Count a request that was refused for now. `reason`: of its CapacityError."""
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


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one adapter version, or of several together."""

    per_minute: int = 0  # begun by the engine, and ended within the last minute
    in_window: int = 0  # within the last WINDOW seconds
    errors: int = 0  # of those, the ones that an error ended
    last_used: float | None = None  # Unix seconds of the last one's end; None: none since the server's start

    def plus(self, other: Answers) -> Answers:
        """Adds another version's answers."""
        last = max(self.last_used or 0, other.last_used or 0) or None
        num, errors = self.in_window + other.in_window, self.errors + other.errors
        return Answers(self.per_minute + other.per_minute, num, errors, last)


NO_ANSWERS = Answers()


def _steps() -> array[int]:
    """Number, answers and errors of each step, one behind the other: the oldest first, none older than the window."""
    return array("q")


@dataclass(slots=True)
class _Counts:
    last_used: float = 0.0
    steps: array[int] = field(default_factory=_steps)
    route: Route | None = None  # with a canary: the last that chose the version
    routed: array[int] = field(default_factory=_steps)  # of the answers that it chose the version for


class Activity:
    """How often adapters answered within the last minutes, and when they did last: of this server, since its start.

    Each count is there twice: of all tenants, and of one. `record` on the event loop, `answers` on any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.time, max_known: int = MAX_KNOWN) -> None:
        self._clock = clock
        self._max_known = max_known
        self._counts: OrderedDict[tuple[str, str, str | None], _Counts] = OrderedDict()  # the latest answer last
        self._in_window: OrderedDict[tuple[str, str, str | None], _Counts] = OrderedDict()  # those with steps, likewise

    def record(self, tenant: str, name: str, digest: str, *, failed: bool, route: Route | None = None) -> None:
        """Count an answer that has ended. Never waits and never fails.

        `route`: of the name, if it has a canary and chose the version, and is the same as when it did.
        """
        now = self._clock()
        for owner in (None, tenant):
            key = (name, digest, owner)
            counts = self._counts.setdefault(key, _Counts())
            counts.last_used = now
            _count(counts.steps, now, failed)
            if route is not None:
                if counts.route != route:
                    counts.route, counts.routed = route, _steps()
                _count(counts.routed, now, failed)
            self._in_window[key] = counts
            for known in (self._counts, self._in_window):
                known.move_to_end(key)
        self._forget(now)

    def _forget(self, now: float) -> None:
        """Drops the steps of versions without an answer within the window, and the longest unused altogether."""
        while next(iter(self._in_window.values())).last_used < now - WINDOW - STEP:
            _, counts = self._in_window.popitem(last=False)
            counts.steps, counts.routed = _steps(), _steps()
        while len(self._counts) > self._max_known:
            key, _ = self._counts.popitem(last=False)
            self._in_window.pop(key, None)

    def answers(self, name: str, digest: str, tenant: str | None = None, since: float = 0.0) -> Answers:
        """The answers of a version to one tenant (None: to all), without those before `since` (Unix seconds)."""
        counts = self._counts.get((name, digest, tenant))
        if counts is None or counts.last_used < since:
            return NO_ANSWERS
        return self._told(counts.steps, counts.last_used, since)

    def routed(self, name: str, digest: str, route: Route, tenant: str | None = None, since: float = 0.0) -> Answers:
        """Those of the answers for which this route, as it is now, chose the version. `last_used` is the version's."""
        counts = self._counts.get((name, digest, tenant))
        if counts is None or counts.route != route or counts.last_used < since:
            return NO_ANSWERS
        return self._told(counts.routed, counts.last_used, since)

    def _told(self, counted: array[int], last_used: float, since: float) -> Answers:
        last = self._clock() // STEP  # not full yet
        before = max(last - WINDOW // STEP, since // STEP - 1)
        flat = counted.tolist()
        steps = [step for step in zip(flat[::3], flat[1::3], flat[2::3], strict=True) if step[0] > before]
        per_minute = sum(num for number, num, _ in steps if number > last - MINUTE // STEP)
        num, errors = sum(step[1] for step in steps), sum(step[2] for step in steps)
        return Answers(per_minute, num, errors, last_used)


def _count(steps: array[int], now: float, failed: bool) -> None:
    """Each change is one call, so that another thread reads whole steps."""
    number = int(now // STEP)
    if not steps or steps[-3] != number:
        steps.extend(array("q", (number, 0, 0)))
        if len(steps) > 3 * WINDOW // STEP:
            del steps[:3]
    steps[-2] += 1
    steps[-1] += failed
