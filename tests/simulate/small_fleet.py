"""Fleets whose times can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lora_serve.core.batch import StepLoad
from lora_serve.simulate.figures import SimulatedRequest
from lora_serve.simulate.fleet import Scenario, SimulatedFleet
from lora_serve.simulate.profiles import Profile, TransferTime
from lora_serve.simulate.workload import Arrival, TraceRow, WorkloadConfig


@dataclass(frozen=True)
class LinearSteps:
    """10 ms and 1 ms per token."""

    def seconds(self, load: StepLoad) -> float:
        return 0.01 + 0.001 * load.num_tokens


SMALL = Profile(
    "small",
    "made up",
    LinearSteps(),
    copy=TransferTime(0.002, 1e12),
    disk=TransferTime(0.05, 1e12),
    remote=TransferTime(0.1, 1e12),
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=200,
    num_blocks=64,
    block_size=4,
    adapter_bytes=100,
    adapter_rank=8,
    max_loras=2,
    host_bytes=400,
    disk_bytes=10_000,
    load_threads=1,
)


def scenario(num_requests: int = 60, num_replicas: int = 1, **fields: Any) -> Scenario:
    """Fields of the workload, the profile and the scenario, told apart by name."""
    workload = {name: fields.pop(name) for name in list(fields) if name in WorkloadConfig.__dataclass_fields__}
    limits = {name: fields.pop(name) for name in list(fields) if name in Profile.__dataclass_fields__}
    config = WorkloadConfig(num_requests, **{"num_adapters": 12, "num_tenants": 4, **workload})
    return Scenario(replace(SMALL, **limits), config, num_replicas, warm_share=0.0, **fields)


def rows(*lengths: tuple[int, int], every: float = 0.05) -> list[TraceRow]:
    """A trace of (prompt, output) lengths at even distances."""
    return [TraceRow(index * every, *pair) for index, pair in enumerate(lengths)]


def run(config: Scenario, arrivals: list[Arrival], policy: str = "fcfs", router: str = "hash") -> SimulatedFleet:
    fleet = SimulatedFleet(config.profile, config.engine_config(policy), router, config.num_replicas)
    fleet.run(arrivals)
    return fleet


def outcomes(fleet: SimulatedFleet) -> list[SimulatedRequest]:
    return sorted(fleet.recorder.outcomes, key=lambda outcome: outcome.index)
