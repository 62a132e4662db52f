"""The workload: recorded arrivals and lengths of language-model services, with adapters and tenants drawn for them.

The first line of a trace tells its format: Azure 2023 (Splitwise, Patel et al., ISCA 2024), Mooncake (Qin et al., FAST
2025), and files of lengths alone, as Vidur's (Agrawal et al., MLSys 2024).

Adapters are drawn here, as no public trace names any: the adapter of popularity rank k with a probability that falls
with k ** zipf, its tenant at random. A conversation of a trace that tells conversations stays with its adapter.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import ConfigError
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams

_MOONCAKE_BLOCK = 512  # tokens of one id of `TraceRow.blocks`
FLOOD = "flood"  # groups of requests whose times to the first token are reported separately
URGENT = "urgent"
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request."""

    time: float | None  # seconds since the first one; None: the trace has lengths only
    num_prompt: int  # tokens
    num_output: int
    blocks: tuple[int, ...] = ()  # Mooncake: ids of the prompt's blocks of 512 tokens; equal ids, equal content


_Reader = Callable[[Iterable[str]], list[TraceRow]]


def read_trace(file: Path) -> list[TraceRow]:
    """The requests in order of arrival, those without prompt or answer left out. Raises ConfigError."""
    try:
        with file.open(newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            rows = _reader_of(first, file)(lines)
    except OSError as error:
        raise ConfigError(f"--trace {file}: cannot be read: {error.strerror or error}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"--trace {file}: a row is not as its first line says: {error!r}") from error
    rows = sorted((row for row in rows if row.num_prompt > 0 and row.num_output > 0), key=lambda row: row.time or 0.0)
    if not rows:
        raise ConfigError(f"--trace {file}: holds no request")
    return rows


def _reader_of(first: str, file: Path) -> _Reader:
    if first.startswith("TIMESTAMP,"):
        return _read_azure
    if first.startswith("num_prefill_tokens,"):
        return _read_lengths
    if first.startswith("{"):
        return _read_mooncake
    raise ConfigError(f"--trace {file}: is none of an Azure 2023 CSV, a Mooncake JSONL, a Vidur CSV of lengths")


def _read_azure(lines: Iterable[str]) -> list[TraceRow]:
    table = [
        (datetime.fromisoformat(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for row in csv.DictReader(lines)
    ]
    start = min((time for time, _, _ in table), default=None)
    return [] if start is None else [TraceRow((row[0] - start).total_seconds(), row[1], row[2]) for row in table]


def _read_mooncake(lines: Iterable[str]) -> list[TraceRow]:
    table = [json.loads(line) for line in lines]
    return [
        TraceRow(row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
        for row in table
    ]


def _read_lengths(lines: Iterable[str]) -> list[TraceRow]:
    return [
        TraceRow(None, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in csv.DictReader(lines)
    ]


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
        if blocks:  # the first block may be the system prompt of all
            drawn[index] = of_conversation.setdefault(blocks[min(1, len(blocks) - 1)], drawn[index])
    return drawn
