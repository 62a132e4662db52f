"""Replicas behind a router: one run of the simulator, its figures, and several runs as a table.

Each replica has its own engine and the loop of `engine/loop.py` in virtual time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lora_serve.core.config import EngineConfig
from lora_serve.core.messages import FinishEvent, PromptEvent, StepEvent
from lora_serve.core.stats import ReplicaReport
from lora_serve.routing.fleet_view import FleetView, RoutedRequest, routed
from lora_serve.routing.routers import create_router
from lora_serve.simulate.figures import Fairness, RequestRecorder, SimulatedRequest, fairness_of
from lora_serve.simulate.profiles import Profile
from lora_serve.simulate.replica import Replica, ReportRequest, Timeline
from lora_serve.simulate.workload import Arrival, TraceRow, WorkloadConfig, make_arrivals

_REPORT_EVERY = 1.0  # seconds
_UNKNOWN_OUTPUT = 256  # tokens: no gateway knows how long an answer will be
_PREFIX_KEY = b"simulation"
_SHARES = (50, 90, 95, 99)
_COLUMNS = (
    "policy", "router", "TTFT p50 s", "TTFT p95 s", "TTFT p99 s", "ITL p50 ms", "ITL p99 ms", "output tokens/s",
    "slot hits", "slot loads/1000", "host loads/1000", "busiest replica", "max service gap", "Jain", "failed",
)  # fmt: skip


class StalledError(Exception):
    """No event is planned any more, and requests have not ended: a bug of the engine or of the simulator."""


class Gateway:
    """One door of the fleet: it knows the replicas by their reports, and its own requests."""

    def __init__(self, router: str, seed: int, replicas: Sequence[Replica]) -> None:
        self._router = create_router(router, seed)
        self.view = FleetView()
        for replica in replicas:
            self.view.add(replica.name)

    def choose(self, request: RoutedRequest) -> str:
        """The replica that gets the request, which counts from now on."""
        name = self._router.choose(request, self.view.replicas)[0]
        self.view.sent(name, request)
        return name


class SimulatedFleet:
    """Requests come to the gateways in turn. Each counts its own from arrival until the step that ended it is over; of
    everything else it knows what replicas reported: once a second, between two steps.
    """

    def __init__(
        self,
        profile: Profile,
        config: EngineConfig,
        router: str,
        num_replicas: int,
        num_warm: int = 0,
        num_gateways: int = 1,
    ) -> None:
        self.timeline = Timeline()
        self.recorder = RequestRecorder(num_replicas, num_warm, dict(config.tenant_weight))
        self.replicas = [Replica(index, profile, config, self.timeline, self._emit) for index in range(num_replicas)]
        self.num_sent = [0] * num_replicas  # requests per replica
        self._by_name = {replica.name: replica for replica in self.replicas}
        self._gateways = [Gateway(router, config.seed + index, self.replicas) for index in range(num_gateways)]
        self._under_way: dict[str, tuple[Gateway, RoutedRequest]] = {}
        self._last_arrival = 0.0
        self._num_warm = num_warm
        self._warm_loads = (0, 0)
        self._key = _PREFIX_KEY if config.enable_prefix_caching else None

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Runs until all requests have ended. Raises StalledError."""
        self._plan_next(iter(arrivals))
        for replica in self.replicas:  # one after another, as replicas start
            self.timeline.at(_REPORT_EVERY * replica.index / len(self.replicas), partial(self._ask, replica))
        self._last_arrival = arrivals[-1].time if arrivals else 0.0
        self.timeline.run()
        if lost := self.recorder.open_requests:
            raise StalledError(f"{len(lost)} of {len(arrivals)} requests never end, the first is {lost[0]}")

    def loads_since_warm(self) -> tuple[int, int]:
        """The loads of adapters into slots and into host memory since the warm-up's requests had come."""
        slot, host = self._loads()
        return slot - self._warm_loads[0], host - self._warm_loads[1]

    def _loads(self) -> tuple[int, int]:
        tiers = [replica.engine.residency.tiers() for replica in self.replicas]
        return sum(tier["device"].loads for tier in tiers), sum(tier["host"].loads for tier in tiers)

    def _ask(self, replica: Replica) -> None:
        """Asks a replica for its report, and again after a second, until the last request has come."""
        replica.post(ReportRequest(self._reported))
        if self.timeline.now < self._last_arrival:
            self.timeline.at(self.timeline.now + _REPORT_EVERY, partial(self._ask, replica))

    def _reported(self, report: ReplicaReport) -> None:
        for gateway in self._gateways:
            gateway.view.update(report)

    def _plan_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self.timeline.at(arrival.time, lambda: self._arrive(arrival, arrivals))

    def _arrive(self, arrival: Arrival, later: Iterator[Arrival]) -> None:
        if arrival.index == self._num_warm:
            self._warm_loads = self._loads()
        request = arrival.request()
        gateway = self._gateways[arrival.index % len(self._gateways)]
        known = routed(request, self._key, gateway.view.expected_output(_UNKNOWN_OUTPUT))
        replica = self._by_name[gateway.choose(known)]
        self._under_way[request.request_id] = (gateway, known)
        self.num_sent[replica.index] += 1
        self.recorder.submitted(arrival, replica.index)
        self._plan_next(later)
        replica.post(request)

    def _emit(self, replica: Replica, events: list[StepEvent]) -> None:
        now = self.timeline.now
        for event in events:
            gateway, known = self._under_way[event.request_id]
            if isinstance(event, PromptEvent):
                replica.roots.add(known.roots)
                gateway.view.answering(replica.name, known)
            if self.recorder.take(event, now):
                num_output = self.recorder.outcomes[-1].num_output if isinstance(event, FinishEvent) else None
                gateway.view.ended(replica.name, known, num_output)
                del self._under_way[event.request_id]
        meter = self.recorder.meters[replica.index]
        if meter.is_due(now):
            meter.look({s.account for s in replica.engine.scheduler.waiting if s.ready_at <= now}, now)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one policy behind one router. Latencies leave the warm-up out; counts are of the whole run."""

    policy: str
    router: str
    num_requests: int
    num_failed: int
    errors: dict[str, int]
    seconds: float  # of virtual time, to the last end
    ttft: dict[str, float]  # seconds: p50, p90, p95, p99
    itl: dict[str, float]
    e2e: dict[str, float]
    ttft_by_group: dict[str, dict[str, float]]
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    slot_hit_rate: float  # requests whose adapter was on the device when they came
    host_hit_rate: float  # of the others, those whose adapter was in host memory
    num_slot_loads: int
    num_host_loads: int
    num_remote_loads: int  # of the loads into host memory, those from the shared store
    num_preemptions: int
    num_steps: int
    prefix_hit_rate: float  # of the prompts' tokens
    busiest_replica: float  # its requests, times the mean's
    fairness: Fairness = field(default_factory=Fairness)
    slot_loads_per_1000: float = 0.0  # requests, the warm-up left out
    host_loads_per_1000: float = 0.0


def summarise(fleet: SimulatedFleet, policy: str, router: str, num_warm: int = 0) -> Summary:
    """The figures of a fleet that has run."""
    outcomes = sorted(fleet.recorder.outcomes, key=lambda outcome: outcome.index)
    counted = [outcome for outcome in outcomes if outcome.index >= num_warm]
    first = [(outcome.group, outcome.first_token - outcome.arrival) for outcome in counted if outcome.first_token]
    tiers = [replica.engine.residency.tiers() for replica in fleet.replicas]
    device, host = ([tier[name] for tier in tiers] for name in ("device", "host"))
    caches = [replica.engine.scheduler.prefix_cache for replica in fleet.replicas]
    span = _span(outcomes)
    per_1000 = [1e3 * count / max(1, len(counted)) for count in fleet.loads_since_warm()]
    return Summary(
        policy=policy,
        router=router,
        num_requests=len(outcomes),
        num_failed=sum(outcome.error is not None for outcome in outcomes),
        errors=dict(sorted(Counter(outcome.error for outcome in outcomes if outcome.error).items())),
        seconds=span,
        ttft=percentiles([seconds for _, seconds in first]),
        itl=percentiles(fleet.recorder.gaps),
        e2e=percentiles([outcome.end - outcome.arrival for outcome in counted if outcome.error is None]),
        ttft_by_group={
            group: percentiles([seconds for other, seconds in first if other == group])
            for group in sorted({group for group, _ in first})
        },
        output_tokens_per_s=sum(outcome.num_output for outcome in outcomes) / span,
        prompt_tokens_per_s=sum(outcome.num_prompt for outcome in outcomes if outcome.first_token) / span,
        slot_hit_rate=_share(sum(tier.hits for tier in device), sum(tier.misses for tier in device)),
        host_hit_rate=_share(sum(tier.hits for tier in host), sum(tier.misses for tier in host)),
        num_slot_loads=sum(tier.loads for tier in device),
        num_host_loads=sum(tier.loads for tier in host),
        num_remote_loads=sum(replica.loader.num_remote for replica in fleet.replicas),
        num_preemptions=sum(replica.engine.scheduler.num_preemptions for replica in fleet.replicas),
        num_steps=sum(replica.runner.num_steps for replica in fleet.replicas),
        prefix_hit_rate=sum(cache.num_hits for cache in caches) / max(1, sum(cache.num_queries for cache in caches)),
        busiest_replica=max(fleet.num_sent) * len(fleet.num_sent) / max(1, len(outcomes)),
        fairness=fairness_of(fleet.recorder.meters),
        slot_loads_per_1000=per_1000[0],
        host_loads_per_1000=per_1000[1],
    )


def table(summaries: Sequence[Summary]) -> str:
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_row, summaries)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles by nearest rank; zeros if there are no times."""
    ordered = sorted(seconds) or [0.0]
    return {f"p{share}": ordered[int(share / 100 * (len(ordered) - 1) + 0.5)] for share in _SHARES}


def _row(summary: Summary) -> tuple[str, ...]:
    return (
        summary.policy,
        summary.router,
        f"{summary.ttft['p50']:.3f}",
        f"{summary.ttft['p95']:.3f}",
        f"{summary.ttft['p99']:.3f}",
        f"{1e3 * summary.itl['p50']:.1f}",
        f"{1e3 * summary.itl['p99']:.1f}",
        f"{summary.output_tokens_per_s:.0f}",
        f"{100 * summary.slot_hit_rate:.1f} %",
        f"{summary.slot_loads_per_1000:.0f}",
        f"{summary.host_loads_per_1000:.0f}",
        f"{summary.busiest_replica:.2f}",
        f"{summary.fairness.max_service_gap:.0f}" if summary.fairness.num_windows else "-",
        f"{summary.fairness.jain:.3f}" if summary.fairness.num_windows else "-",
        f"{summary.num_failed}",
    )


def _share(part: int, rest: int) -> float:
    return part / (part + rest) if part + rest else 0.0


def _span(outcomes: Sequence[SimulatedRequest]) -> float:
    first = min((outcome.arrival for outcome in outcomes), default=0.0)
    return max(1e-9, max((outcome.end for outcome in outcomes), default=0.0) - first)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The same requests for every policy and router."""

    profile: Profile
    workload: WorkloadConfig
    num_replicas: int = 1
    warm_share: float = 0.2  # of the requests: the first ones, while the caches fill, are in no latency
    max_queue: int = 100_000  # waiting requests per replica
    batch_wait: float = 0.0
    max_wait: float = 10.0
    tenant_weights: tuple[tuple[str, float], ...] = ()
    enable_prefix_caching: bool = True
    num_gateways: int = 1

    def engine_config(self, policy: str) -> EngineConfig:
        profile = self.profile
        return EngineConfig(
            speculate="off",  # the tokens of a simulation are no text: guesses of them would say nothing
            max_num_seqs=profile.max_num_seqs,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            batch_wait_ms=1000 * self.batch_wait,
            prompt_stretch=0,
            max_queue=self.max_queue,
            block_size=profile.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=policy,
            seed=self.workload.seed,
            max_wait_ms=1000 * self.max_wait,
            tenant_weight=self.tenant_weights,
        )

    def arrivals(self, rows: Sequence[TraceRow]) -> list[Arrival]:
        """The requests, drawn once for all runs."""
        profile = self.profile
        return make_arrivals(rows, self.workload, profile.adapter_bytes, profile.adapter_rank, profile.max_model_len)

    def run(self, arrivals: Sequence[Arrival], policy: str, router: str) -> Summary:
        num_warm = int(self.warm_share * len(arrivals))
        fleet = SimulatedFleet(
            self.profile, self.engine_config(policy), router, self.num_replicas, num_warm, self.num_gateways
        )
        fleet.run(arrivals)
        return summarise(fleet, policy, router, num_warm)
