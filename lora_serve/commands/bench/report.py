"""The records of a load (every time in seconds since its start), their figures, and report.json: one object, whose
fields keep their names.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import lora_serve

CountedBy = Literal["continuous", "ids", "usage", "chunks"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that arrived at one moment."""

    time: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The course of one request; after a failure `chunks` are those received until then.

    Counts and times of tokens are those of `sending.count_tokens`.
    """

    index: int
    adapter: str | None
    prompt_tokens: int  # as the server counted them, else as planned
    asked_tokens: int
    planned: float  # when it was to be sent: `sent` in a closed loop
    sent: float
    ended: float
    chunks: tuple[Chunk, ...] = ()
    counted_by: CountedBy = "chunks"
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None  # its kind: http_429, timeout, connection, hang_up, stream_error, bad_stream, cut_off
    detail: str = ""  # the error in words

    @property
    def output_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def first_token(self) -> float:
        """Seconds from the planned time. Raises IndexError without any token."""
        return self.chunks[0].time - self.planned

    @property
    def whole(self) -> float:
        """Seconds from the planned time to the end of the answer."""
        return self.ended - self.planned

    @property
    def chunk_gaps(self) -> tuple[float, ...]:
        """Seconds between arrivals."""
        return tuple(later.time - earlier.time for earlier, later in itertools.pairwise(self.chunks))

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between tokens, one less than there are tokens; they sum up to the time from first to last.

        A chunk of m tokens shares the time since the chunk before evenly among them: m gaps of 1/m. Those that came
        together with the first token have gaps of 0. `chunk_gaps` are the pauses that a reader sees.
        """
        if not self.chunks:
            return ()
        shared = [0.0] * (self.chunks[0].num_tokens - 1)
        for gap, chunk in zip(self.chunk_gaps, self.chunks[1:], strict=True):
            shared += [gap / chunk.num_tokens] * chunk.num_tokens
        return tuple(shared)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`records` in the order in which the requests were begun; the warm-up's are left out."""

    began: float  # Unix time
    seconds: float  # from the start to the end of the last answer
    records: tuple[RequestRecord, ...]

    @property
    def answered(self) -> tuple[RequestRecord, ...]:
        return tuple(record for record in self.records if record.error is None)

    @property
    def failed(self) -> tuple[RequestRecord, ...]:
        return tuple(record for record in self.records if record.error is not None)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of the requests that were answered completely."""
        return sum(record.output_tokens for record in self.answered) / self.seconds if self.seconds else 0.0


SHARES = (50, 90, 99)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of ascending values, interpolated between the two nearest as numpy does; 0 of nothing. `share`: 0
    to 100.
    """
    if not ordered:
        return 0.0
    place = share / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_ms(seconds: Iterable[float]) -> dict[str, float]:
    """p50, p90, p99, mean, max in ms."""
    ordered = sorted(seconds)
    found = {f"p{share}": percentile(ordered, share) for share in SHARES}
    found["mean"] = math.fsum(ordered) / len(ordered) if ordered else 0.0
    found["max"] = ordered[-1] if ordered else 0.0
    return {name: round(1000 * value, 3) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Objective:
    """A service level in seconds; None: any. `itl` bounds a request's mean time between tokens."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        if record.error is not None:
            return False
        gaps = record.gaps
        mean_gap = math.fsum(gaps) / len(gaps) if gaps else 0.0
        found = (record.first_token, mean_gap, record.whole)
        limits = (self.ttft, self.itl, self.e2e)
        return all(limit is None or value <= limit for value, limit in zip(found, limits, strict=True))


def in_flight(records: Iterable[RequestRecord], seconds: float, points: int = 200) -> list[tuple[float, int]]:
    """(time, requests sent and not ended) at evenly spaced moments."""
    sent = sorted(record.sent for record in records)
    ended = sorted(record.ended for record in records)
    found, num_sent, num_ended = [], 0, 0
    for number in range(points + 1):
        now = seconds * number / points
        while num_sent < len(sent) and sent[num_sent] <= now:
            num_sent += 1
        while num_ended < len(ended) and ended[num_ended] <= now:
            num_ended += 1
        found.append((round(now, 4), num_sent - num_ended))
    return found


def tokens_over_time(records: Iterable[RequestRecord], seconds: float) -> list[tuple[float, float]]:
    """(middle of the bin, output tokens per second) in bins of a quarter of a second or more, 12 to 60 of them.

    Tokens of failed requests count too, as the server made them.
    """
    bins = min(60, max(12, int(4 * seconds)))
    width = seconds / bins if seconds > 0 else 1.0
    counts = [0] * bins
    for record in records:
        for chunk in record.chunks:
            counts[min(bins - 1, max(0, int(chunk.time / width)))] += chunk.num_tokens
    return [(round((index + 0.5) * width, 4), round(count / width, 2)) for index, count in enumerate(counts)]


BASE_LABEL = "(base)"
_CPU_NUMBERS = {  # x86-64's, then arm64's, which has no names
    "family": "cpu family", "model": "model", "stepping": "stepping",
    "implementer": "CPU implementer", "part": "CPU part", "revision": "CPU revision",
}  # fmt: skip
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_BF16_PRODUCTS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class RunFacts:
    engine: str
    model: str
    popularity: str
    num_adapters: int
    concurrency: int | None
    rate: float | None
    seed: int
    command: str
    engine_version: str | None = None
    server: Mapping[str, Any] = field(default_factory=dict)  # of a spawned one: shape, start_s, peak_rss_bytes
    kernels: Mapping[str, str] = field(default_factory=dict)  # the server's: level, dtype, order, source


def make_report(result: LoadResult, facts: RunFacts, objective: Objective | None = None) -> dict[str, Any]:
    """The report as JSON's types."""
    given = asdict(facts)
    command, server, version = given.pop("command"), given.pop("server"), given.pop("engine_version")
    began = datetime.datetime.fromtimestamp(result.began, datetime.UTC)
    return {
        **given,
        **summarise(result, objective),
        "per_adapter": per_adapter(result),
        "errors": dict(Counter(record.error for record in result.failed)),
        "error_examples": {str(record.error): record.detail for record in reversed(result.failed)},
        "in_flight": in_flight(result.records, result.seconds),
        "tokens_over_time": tokens_over_time(result.records, result.seconds),
        "command": command,
        "date": began.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(("aiohttp", "torch", "transformers")) | ({"engine": version} if version else {}),
        "server": dict(server),
    }


def summarise(result: LoadResult, objective: Objective | None = None) -> dict[str, Any]:
    """Figures of one load. Latencies and tokens are of answered requests only.

    ttft_ms and e2e_ms count from the planned time; itl_ms over all gaps between tokens (`RequestRecord.gaps`),
    chunk_gap_ms over those between arrivals; token_counts: how requests' tokens were counted.
    """
    answered = result.answered
    num_tokens = sum(record.output_tokens for record in answered)
    num_chunks = sum(len(record.chunks) for record in answered)
    return {
        "requests": len(result.records),
        "failed": len(result.failed),
        "duration_s": round(result.seconds, 4),
        "requests_per_s": _per_second(len(answered), result),
        "output_tokens": num_tokens,
        "output_tokens_per_s": _per_second(num_tokens, result),
        "prompt_tokens": sum(record.prompt_tokens for record in answered),
        "prompt_tokens_per_s": _per_second(sum(record.prompt_tokens for record in answered), result),
        "ttft_ms": spread_ms(record.first_token for record in answered),
        "itl_ms": spread_ms(gap for record in answered for gap in record.gaps),
        "e2e_ms": spread_ms(record.whole for record in answered),
        "chunk_gap_ms": spread_ms(gap for record in answered for gap in record.chunk_gaps),
        "tokens_per_chunk": round(num_tokens / num_chunks, 3) if num_chunks else 0.0,
        "token_counts": dict(Counter(record.counted_by for record in answered)),
        "ended_early": sum(record.output_tokens < record.asked_tokens for record in answered),
        "sent_late_ms": spread_ms(record.sent - record.planned for record in result.records),
        "goodput": None if objective is None else _goodput(result, objective),
    }


def per_adapter(result: LoadResult) -> dict[str, dict[str, Any]]:
    """Figures per adapter, the most requested first; the base model is `(base)`."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in result.records:
        groups.setdefault(record.adapter or BASE_LABEL, []).append(record)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: _of_adapter(records, result) for name, records in ordered}


def write_report(folder: Path, report: Mapping[str, Any]) -> Path:
    """Writes report.json; returns its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.json"
    file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    return file


def _of_adapter(records: Sequence[RequestRecord], result: LoadResult) -> dict[str, Any]:
    answered = [record for record in records if record.error is None]
    num_tokens = sum(record.output_tokens for record in answered)
    return {
        "requests": len(records),
        "failed": len(records) - len(answered),
        "output_tokens": num_tokens,
        "output_tokens_per_s": _per_second(num_tokens, result),
        "ttft_ms": spread_ms(record.first_token for record in answered),
        "itl_ms": spread_ms(gap for record in answered for gap in record.gaps),
    }


def _goodput(result: LoadResult, objective: Objective) -> dict[str, Any]:
    """Requests per second that met the objective; failed ones did not."""
    met = [record for record in result.records if objective.is_met(record)]
    limits = {f"{name}_ms": 1000 * limit for name, limit in asdict(objective).items() if limit is not None}
    return {
        "slo": limits,
        "requests_per_s": _per_second(len(met), result),
        "output_tokens_per_s": _per_second(sum(record.output_tokens for record in met), result),
        "share": round(len(met) / len(result.records), 4) if result.records else 0.0,
    }


def _per_second(amount: float, result: LoadResult) -> float:
    rate = amount / result.seconds if result.seconds > 0 else 0.0
    return round(rate, 3) if math.isfinite(rate) else 0.0


def machine() -> dict[str, Any]:
    """The load generator's machine; with --spawn also the server's."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        **processor(Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def processor_words(found: Mapping[str, Any]) -> str:
    """The processor of a `machine`: "AMD EPYC (family 25, model 1, stepping 1), 2 cores, without bf16 instructions"."""
    numbers = f" ({found['cpu_numbers']})" if found.get("cpu_numbers") else ""
    instructions = "with" if found["bf16_instructions"] else "without"
    return f"{found['cpu']}{numbers}, {found['cores']} cores, {instructions} bf16 instructions"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of this project and of the installed libraries that matter."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"lora_serve": lora_serve.__version__}


def processor(cpuinfo: str) -> dict[str, Any]:
    """The first processor of /proc/cpuinfo: its name, its numbers, and those of its instructions that decide speeds.

    A virtual machine's name may hide which processor it is; family, model and stepping tell.
    """
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = set(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())
    numbers = [f"{name} {fields[field]}" for name, field in _CPU_NUMBERS.items() if field in fields]
    return {
        "cpu": fields.get("model name", platform.machine() if numbers else "unknown"),
        "cpu_numbers": ", ".join(numbers),
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "bf16_instructions": bool(flags & _BF16_PRODUCTS),
    }
