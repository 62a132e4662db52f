"""One step of the model in this process: its time, its floor, and where the time goes.

    python -m benchmarks.step [--shape 135m] [--rows 16] [--context 200] [--dtype float32] [--rounds 15] [--clock wall]

Random weights; decode steps of `--rows` rows with `--context` keys each and of one row, and a prompt of 256 tokens,
without adapters, with one for all, and with one of its own for each row (ranks 8, 16 and 32 in turn, every linear
layer). All cases and the floors' products, this project's and oneDNN's, alternate; medians. The floor is explained in
benchmarks/step_floor.py, the parts in benchmarks/step_seams.py. No server runs and no tokenizer: what is measured is
`ModelRunner.run`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.alternating import CLOCK_HELP, CLOCKS, Clock, median_ratio, time_alternating
from benchmarks.checkpoints import SHAPES, make_checkpoints
from benchmarks.report import kernel_level, machine, result_file
from benchmarks.step_floor import gemms_of, onednn_gemms_of, read_bandwidth
from benchmarks.step_model import RANKS, LoadedAdapter, StepModel, blocks_of, decode_batch, prefill_batch
from benchmarks.step_seams import parts_of
from lora_serve.core.batch import Batch

PROMPT = 256  # tokens
DTYPES = ("float32", "bfloat16")
NUM_OPERATORS = 12
OWN, ONEDNN = "the server's own products", "oneDNN's products"


@dataclass(frozen=True, slots=True)
class StepCase:
    """One kind of step."""

    batch: Batch
    floor_bytes: int  # beside the base's weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=200, help="keys that each decode row attends to")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights, activations and KV cache")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help=CLOCK_HELP)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"), help="folder of checkpoints")
    parser.add_argument("--out", type=Path, help="default: results/step-<kernels' level>-<dtype>.json")
    options = parser.parse_args()
    out: Path = options.out or result_file("step", kernel_level(), options.dtype)
    folder, _ = make_checkpoints(options.cache, options.shape, 0, 0)
    model = StepModel(folder, options.rows, 2**30, options.dtype)
    adapters = model.load([RANKS[i % len(RANKS)] for i in range(options.rows)])
    model.touch(max(options.rows * blocks_of(options.context), blocks_of(PROMPT)))
    report = {
        "machine": machine(),
        "command": f"python -m benchmarks.step --shape {options.shape} --rows {options.rows} "
        f"--context {options.context} --dtype {options.dtype} --rounds {options.rounds} --clock {options.clock}",
        "shape": options.shape,
        "dtype": model.spec.dtype,
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "rows": options.rows,
        "context": options.context,
        "rounds": options.rounds,
        "base_weights": sum(linear.in_features * linear.out_features for linear in model.spec.linears.values()),
        "head_weights": head_weights(model),
        "weight_bytes": getattr(torch, model.spec.dtype).itemsize,
        "kv_token_bytes": model.kv_token_bytes,
        "adapter_bytes": [adapter.num_bytes for adapter in adapters],
        **measure(model, cases_of(model, adapters, options.context), options.rounds, CLOCKS[options.clock]),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['machine']['cpu']}, kernels {report['machine']['kernels']}, {report['dtype']}")
    for name, found in report["cases"].items():
        products = "   ".join(f"{whose} {ms:.2f}" for whose, ms in found["gemms_ms"].items())
        print(
            f"{name:22} {found['ms']:8.2f} ms   floor {found['floor_ms']:8.2f}   {found['step_over_floor']:.2f}   "
            f"({products})"
        )
    print(json.dumps(report["ratios"], indent=1))


def head_weights(model: StepModel) -> int:
    """Of the output head, which runs on the rows that are sampled only."""
    head = model.spec.linears[model.spec.output_head]
    return head.in_features * head.out_features


def cases_of(model: StepModel, adapters: Sequence[LoadedAdapter], context: int) -> dict[str, StepCase]:
    """Steps by name: "<rows> rows, base", "<rows> rows, identical", "<rows> rows, distinct", ..."""
    first, rows = adapters[0], len(adapters)
    users: dict[str, list[LoadedAdapter | None]] = {
        f"{rows} rows, base": [None] * rows,
        f"{rows} rows, identical": [first] * rows,
        f"{rows} rows, distinct": list(adapters),
        "1 row, base": [None],
        "1 row, identical": [first],
    }
    cases = {}
    for name, used in users.items():
        known = [adapter for adapter in used if adapter is not None]
        floor = model.decode_floor_bytes(len(used), context, known)
        cases[name] = StepCase(decode_batch(used, context), floor)
    cases["prompt, base"] = StepCase(prefill_batch([None], PROMPT), 0)
    cases["prompt, identical"] = StepCase(prefill_batch([first], PROMPT), first.num_bytes)
    return cases


def measure(model: StepModel, cases: Mapping[str, StepCase], rounds: int, clock: Clock) -> dict[str, Any]:
    """The report's figures: bandwidth, cases, ratios, operators."""
    run = model.parts.runner.run
    calls: dict[str, Callable[[], object]] = {
        name: lambda batch=case.batch: run(batch)  # type: ignore[misc]
        for name, case in cases.items()
    }
    gemms = {name.partition(",")[0]: _gemms(model, case.batch) for name, case in cases.items() if name.endswith("base")}
    for step, both in gemms.items():
        calls |= {f"{step}: {whose}": call for whose, call in both.items()}
    times = time_alternating(calls, rounds, clock)
    bandwidth = read_bandwidth(clock)
    found = {}
    for name, case in cases.items():
        step = name.partition(",")[0]
        gemms_ms = {whose: _ms(times[f"{step}: {whose}"]) for whose in gemms[step]}
        faster = min(gemms_ms, key=lambda whose: gemms_ms[whose])
        gemm_seconds = times[f"{step}: {faster}"]
        floor = [seconds + case.floor_bytes / bandwidth for seconds in gemm_seconds]
        found[name] = {
            "tokens": case.batch.num_tokens,
            "rows": len(case.batch.rows),
            "ms": _ms(times[name]),
            "least_ms": round(min(times[name]) * 1e3, 3),
            "gemm_ms": _ms(gemm_seconds),
            "gemms_ms": gemms_ms,
            "floor_bytes": case.floor_bytes,
            "floor_ms": _ms(floor),
            "step_over_floor": round(median_ratio(times[name], floor), 3),
            "step_over_own_gemms": round(median_ratio(times[name], times[f"{step}: {OWN}"]), 3),
            "parts_ms": _parts(calls[name], model.spec.vocab_size, rounds, clock),
        }
    return {
        "read_bytes_per_second": round(bandwidth),
        "cases": found,
        "ratios": ratios(times),
        "operators": operators(calls[next(name for name in calls if name.endswith("distinct"))]),
    }


def _gemms(model: StepModel, batch: Batch) -> dict[str, Callable[[], object]]:
    """The step's products, by whose they are."""
    found: dict[str, Callable[[], object]] = {OWN: gemms_of(model, batch)}
    if (others := onednn_gemms_of(model, batch)) is not None:
        found[ONEDNN] = others
    return found


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each case with adapters against its own base, pairs of neighbouring steps."""
    return {
        f"{name} / base": round(median_ratio(found, times[f"{name.partition(',')[0]}, base"]), 3)
        for name, found in times.items()
        if name.endswith((", identical", ", distinct"))
    }


def operators(run: Callable[[], object], steps: int = 5) -> list[dict[str, Any]]:
    """torch's own operators by the time inside them alone, per step."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            run()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_cpu_time_total)[:NUM_OPERATORS]
    return [
        {"name": row.key, "calls": row.count // steps, "self_ms": round(row.self_cpu_time_total / steps / 1e3, 3)}
        for row in rows
    ]


def _parts(run: Callable[[], object], vocab_size: int, rounds: int, clock: Clock) -> dict[str, float]:
    found = [parts_of(run, vocab_size, clock) for _ in range(rounds)]
    return {part: _ms([one[part] for one in found]) for part in found[0]}


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


if __name__ == "__main__":
    main()
