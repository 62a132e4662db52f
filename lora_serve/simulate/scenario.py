"""The parameters of one run of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.core.config import BatchLimits, EngineConfig, QueueLimits
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.profiles import Profile
from lora_serve.simulate.report import Summary, summarise
from lora_serve.simulate.traces import TraceRow
from lora_serve.simulate.workload import Arrival, WorkloadConfig, make_arrivals


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

    def engine_config(self, policy: str) -> EngineConfig:
        """The configuration of every replica."""
        profile = self.profile
        return EngineConfig(
            batch=BatchLimits(profile.max_num_seqs, profile.max_num_batched_tokens, self.batch_wait),
            queue=QueueLimits(self.max_queue),
            kv_cache_memory=None,
            block_size=profile.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=policy,
            seed=self.workload.seed,
            max_wait=self.max_wait,
            tenant_weights=self.tenant_weights,
        )

    def arrivals(self, rows: Sequence[TraceRow]) -> list[Arrival]:
        """The requests, drawn once for all runs."""
        profile = self.profile
        return make_arrivals(
            rows, self.workload, profile.adapter_bytes, profile.adapter_rank, profile.max_model_len
        )  # fmt: skip

    def run(self, arrivals: Sequence[Arrival], policy: str, router: str) -> Summary:
        """Simulates one policy behind one router."""
        num_warm = int(self.warm_share * len(arrivals))
        fleet = Fleet(self.profile, self.engine_config(policy), router, self.num_replicas, num_warm)
        fleet.run(arrivals)
        return summarise(fleet, policy, router, num_warm)
