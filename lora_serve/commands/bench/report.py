"""report.json: one object; the fields that other tools read keep their names."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lora_serve
from lora_serve.commands.bench.result import (
    LoadResult,
    Objective,
    RequestRecord,
    in_flight,
    spread_ms,
    tokens_over_time,
)

BASE_LABEL = "(base)"
_CPU_NUMBERS = {  # x86-64's, then arm64's, which has no names
    "family": "cpu family", "model": "model", "stepping": "stepping",
    "implementer": "CPU implementer", "part": "CPU part", "revision": "CPU revision",
}  # fmt: skip
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_BF16_PRODUCTS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run that its report repeats."""

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
