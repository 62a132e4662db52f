"""The workload: a trace's arrivals and lengths, with adapters and tenants drawn for them.

Adapters are drawn here, as no public trace names any: the adapter of popularity rank k with a probability that falls
with k ** zipf, its tenant at random. A conversation of a trace that tells conversations stays with its adapter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.simulate.traces import TraceRow

_MOONCAKE_BLOCK = 512  # tokens of one id of `TraceRow.blocks`
FLOOD = "flood"  # groups of requests whose times to the first token are reported separately
URGENT = "urgent"
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """The parameters of the draw."""

    num_requests: int
    rate: float | None = None  # requests per second of the whole fleet; None: as in the trace
    num_adapters: int = 1000
    num_tenants: int = 100
    zipf: float = 1.0
    flood: float = 0.0  # share of the requests that come from one tenant more, beside its own
    urgent: float = 0.0  # share of the requests of priority -1
    timeout: float | None = None  # seconds from arrival to each request's deadline
    shared_prefix: int = 0  # tokens with which every prompt of one adapter begins
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the fleet, without its tokens."""

    index: int
    time: float
    num_prompt: int
    num_output: int
    adapter: AdapterRef
    group: str
    deadline: float | None = None
    shared_prefix: int = 0
    blocks: tuple[int, ...] = ()

    def request(self) -> InferenceRequest:
        """The request with tokens that are equal where prompts are equal; no token means anything."""
        return InferenceRequest(
            str(self.index),
            self._tokens(),
            SamplingParams(max_tokens=self.num_output, temperature=0.0, ignore_eos=True, seed=0),
            (AdapterUse(self.adapter),),
            tenant=self.adapter.tenant,
            account=self.adapter.tenant,
            priority=-1 if self.group == URGENT else 0,
            arrival_time=self.time,
            deadline=self.deadline,
        )

    def _tokens(self) -> tuple[int, ...]:
        if self.blocks:
            tokens = tuple(block for block in self.blocks for _ in range(_MOONCAKE_BLOCK))[: self.num_prompt]
            return tokens + (self.index,) * (self.num_prompt - len(tokens))
        num_shared = min(self.shared_prefix, self.num_prompt - 1)
        return (-1,) * num_shared + (self.index,) * (self.num_prompt - num_shared)


def make_arrivals(
    rows: Sequence[TraceRow], config: WorkloadConfig, adapter_bytes: int, rank: int, max_model_len: int
) -> list[Arrival]:
    """The requests in order of time. A trace that is too short is repeated; lengths are cut to `max_model_len`."""
    generator = random.Random(config.seed)
    times = _times(rows, config, generator)
    adapters = _adapters(config, adapter_bytes, rank, generator)
    draws = _draws(rows, config, adapters, generator)
    flooding = [ref for ref in adapters if ref.tenant == adapters[0].tenant]
    arrivals = []
    for index, time in enumerate(times):
        row, adapter, group = rows[index % len(rows)], draws[index], OTHERS
        if generator.random() < config.flood:
            adapter, group = generator.choice(flooding), FLOOD
        elif generator.random() < config.urgent:
            group = URGENT
        num_output = min(row.num_output, max_model_len - 1)
        num_prompt = min(row.num_prompt, max_model_len - num_output)
        deadline = None if config.timeout is None else time + config.timeout
        arrivals.append(
            Arrival(
                index, time, num_prompt, num_output, adapter, group, deadline, config.shared_prefix, row.blocks
            )
        )  # fmt: skip
    return arrivals


def _times(rows: Sequence[TraceRow], config: WorkloadConfig, generator: random.Random) -> list[float]:
    """The trace's times, repeated; those of a Poisson process if it has none."""
    recorded = [row.time for row in rows if row.time is not None]
    if not recorded:
        return list(accumulate(generator.expovariate(config.rate or 1.0) for _ in range(config.num_requests)))
    span = (recorded[-1] - recorded[0]) * len(rows) / max(1, len(rows) - 1) or 1.0
    pace = 1.0 if config.rate is None else len(rows) / span / config.rate
    return [
        pace * (recorded[index % len(rows)] - recorded[0] + span * (index // len(rows)))
        for index in range(config.num_requests)
    ]


def _adapters(config: WorkloadConfig, num_bytes: int, rank: int, generator: random.Random) -> list[AdapterRef]:
    """The adapters, the most popular first."""
    tenants = [index % config.num_tenants for index in range(config.num_adapters)]
    generator.shuffle(tenants)
    return [
        AdapterRef(f"t{tenant:04d}", f"t{tenant:04d}/a{index:05d}", 1, f"sha256:{index:064x}", rank, num_bytes)
        for index, tenant in enumerate(tenants)
    ]


def _draws(
    rows: Sequence[TraceRow], config: WorkloadConfig, adapters: list[AdapterRef], generator: random.Random
) -> list[AdapterRef]:
    """One adapter per request; the requests of one conversation have the same."""
    cumulated = list(accumulate((rank + 1) ** -config.zipf for rank in range(len(adapters))))
    drawn = generator.choices(adapters, cum_weights=cumulated, k=config.num_requests)
    of_conversation: dict[int, AdapterRef] = {}
    for index in range(config.num_requests):
        blocks = rows[index % len(rows)].blocks
        if blocks:  # the first block may be everybody's system prompt
            drawn[index] = of_conversation.setdefault(blocks[min(1, len(blocks) - 1)], drawn[index])
    return drawn
