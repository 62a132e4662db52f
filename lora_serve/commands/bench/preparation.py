"""Makes a target and a plan from the flags and the server's own answers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.commands.bench.discovery import Found, discover, find_words
from lora_serve.commands.bench.flags import api_key, popularity_of
from lora_serve.commands.bench.plan import Plan, Target
from lora_serve.commands.bench.workload import FIRST_TOKEN_ID, Arrivals, Workload
from lora_serve.core.errors import ConfigError
from lora_serve.simulate.workload import TraceRow, read_trace

NUM_REQUESTS = 64
CONCURRENCY = 16  # of a closed loop


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything a run needs."""

    target: Target
    workload: Workload
    plan: Plan
    engine: str
    version: str | None
    kernels: Mapping[str, str]


async def prepare(flags: argparse.Namespace, url: str) -> Prepared:
    """Makes the run's target and plan. Raises ConfigError for what neither the flags nor the server tell."""
    key = api_key(flags)
    root = Target(url, "").root
    found = await discover(root, key)
    model = flags.model or found.base
    if model is None:
        raise ConfigError("--model: the server lists none, so name it")
    is_text = flags.prompt_form == "text" or flags.endpoint == "chat"
    vocab_size = flags.vocab_size or found.vocab_size
    words = await find_words(root, key, vocab_size, flags.seed) if is_text else ()
    workload = _workload(flags, found, vocab_size, words)
    return Prepared(
        _target(flags, url, model, key, found),
        workload,
        _plan(flags, workload),
        flags.engine or found.engine or "unknown",
        found.version,
        found.kernels,
    )


def _target(flags: argparse.Namespace, url: str, model: str, key: str | None, found: Found) -> Target:
    return Target(
        url,
        model,
        flags.endpoint,
        key,
        flags.adapter_field,
        found.adapter_ids,
        flags.ignore_eos,
        flags.usage,
        flags.extra_body,
        flags.response_format,
        timeout=flags.timeout,
    )


def _workload(flags: argparse.Namespace, found: Found, vocab_size: int | None, words: tuple[str, ...]) -> Workload:
    if not words and (vocab_size is None or vocab_size <= FIRST_TOKEN_ID):
        raise ConfigError("--vocab-size: the server does not say it, and token ids must be below it")
    trace = tuple(read_trace(flags.trace)) if flags.trace is not None else ()
    return Workload(
        num_requests=_num_requests(flags, trace),
        vocab_size=vocab_size or 0,
        prompt_lengths=flags.prompt_tokens,
        output_lengths=flags.output_tokens,
        popularity=popularity_of(flags),
        adapters=_adapters(flags, found),
        zipf=flags.zipf,
        arrivals=None if flags.rate is None else Arrivals(flags.rate, flags.burstiness or 1.0),
        trace=trace,
        speed=flags.speed,
        words=words,
        max_model_len=found.max_model_len,
        seed=flags.seed,
    )


def _num_requests(flags: argparse.Namespace, trace: tuple[TraceRow, ...]) -> int | None:
    if flags.num_requests is not None:
        return int(flags.num_requests)
    return None if flags.duration is not None else len(trace) or NUM_REQUESTS


def _adapters(flags: argparse.Namespace, found: Found) -> tuple[str, ...]:
    wanted: int | tuple[str, ...] | None = flags.adapters
    if isinstance(wanted, tuple):
        return wanted
    if isinstance(wanted, int) and flags.adapter_name_pattern is not None:
        return _named(flags.adapter_name_pattern, wanted)
    if wanted is not None and len(found.adapters) < wanted:
        raise ConfigError(f"--adapters {wanted}: the server lists {len(found.adapters)}")
    if popularity_of(flags) != "base" and not found.adapters:
        raise ConfigError(f"--popularity {popularity_of(flags)}: the server lists no adapter; name some by --adapters")
    return found.adapters[:wanted] if wanted or popularity_of(flags) != "base" else ()


def _named(pattern: str, num_names: int) -> tuple[str, ...]:
    try:
        names = tuple(pattern.format(index) for index in range(num_names))
    except (IndexError, KeyError, ValueError) as error:
        raise ConfigError(
            f"--adapter-name-pattern {pattern!r}: expected one place for a number, as a{{:04d}}"
        ) from error
    if len(set(names)) < num_names:
        raise ConfigError(f"--adapter-name-pattern {pattern!r}: has no place for a number, as a{{:04d}}")
    return names


def _plan(flags: argparse.Namespace, workload: Workload) -> Plan:
    is_open = workload.arrivals is not None or any(row.time is not None for row in workload.trace)
    concurrency = flags.concurrency or (None if is_open else CONCURRENCY)
    return Plan(workload, concurrency, flags.duration, warmup=workload.warmup(flags.warmup_requests))
