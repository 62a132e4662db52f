"""Recorded arrivals and lengths of language-model services. None of the public traces names adapters or tenants.

The first line tells the format: Azure 2023 (Splitwise, Patel et al., ISCA 2024), Mooncake (Qin et al., FAST 2025), and
files of lengths alone, as Vidur's (Agrawal et al., MLSys 2024).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lora_serve.core.errors import ConfigError


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
