"""How the cost of a step grows: with rows, context, adapters, ranks, the length of a prompt, adapters registered.

    python -m benchmarks.step_growth [--shape 135m] [--dtype float32] [--rounds 7] [--only rows ...] [--out FILE.json]

In this process, random weights, as benchmarks/step.py; within a panel all cases alternate, medians in milliseconds.
`registered` runs no model (benchmarks/registered.py). Writes one JSON; `python -m benchmarks.performance` draws it.
`--only` keeps the other panels' figures of the last run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import registered
from benchmarks.alternating import CLOCK_HELP, CLOCKS, Clock, time_alternating
from benchmarks.checkpoints import SHAPES, make_checkpoints
from benchmarks.report import kernel_level, machine, result_file
from benchmarks.step import DTYPES
from benchmarks.step_model import RANKS, LoadedAdapter, StepModel, blocks_of, decode_batch, prefill_batch
from lora_serve.core.batch import Batch

ROWS, CONTEXT = 16, 200  # where nothing else is said
NUM_ADAPTERS = 16
ALL_ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 128, 256, 512, 1024, 2048)
COUNTS = (0, 1, 2, 4, 8, 16)
ALL_RANKS = (4, 8, 16, 32, 64, 128)
CHUNKS = (16, 32, 64, 128, 256, 512)
Panel = dict[str, Any]  # x: [...], series: name -> [ms]
Cases = Mapping[str, Sequence[Batch]]  # series -> a batch for each x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="135m")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights, activations and KV cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=[*PANELS, "registered"], default=[*PANELS, "registered"])
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help=CLOCK_HELP)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"), help="folder of checkpoints")
    parser.add_argument("--out", type=Path, help="default: results/step-growth-<kernels' level>-<dtype>.json")
    options = parser.parse_args()
    out: Path = options.out or result_file("step-growth", kernel_level(), options.dtype)
    facts: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    panels = facts.pop("panels", {})
    facts |= {"machine": machine(), "shape": options.shape, "rounds": options.rounds}
    facts["command"] = (
        f"python -m benchmarks.step_growth --shape {options.shape} --dtype {options.dtype} --rounds {options.rounds} "
        f"--clock {options.clock}"
    )
    wanted = [name for name in options.only if name in PANELS]
    if wanted:
        growth = Growth(options.shape, options.dtype, options.rounds, CLOCKS[options.clock], options.cache)
        facts |= {"dtype": growth.model.spec.dtype, "threads": torch.get_num_threads(), "clock": options.clock}
    for name in options.only:
        panels[name] = PANELS[name](growth) if name in PANELS else registered_panel()
        print(name, json.dumps(panels[name]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**facts, "panels": panels}, indent=1) + "\n")


class Growth:
    """The model and its 16 adapters of ranks 8, 16 and 32."""

    def __init__(self, shape: str, dtype: str, rounds: int, clock: Clock, cache: Path) -> None:
        folder, _ = make_checkpoints(cache, shape, 0, 0)
        self.rounds = rounds
        self._clock = clock
        token = self._bytes_per_token(folder)
        num_blocks = max(max(ALL_ROWS) * blocks_of(CONTEXT), ROWS * blocks_of(max(CONTEXTS)))
        self.model = StepModel(folder, NUM_ADAPTERS, (num_blocks + 8) * 16 * token, dtype)
        self.adapters = self.model.load([RANKS[i % len(RANKS)] for i in range(NUM_ADAPTERS)])
        self.model.touch(num_blocks)

    @staticmethod
    def _bytes_per_token(folder: Path) -> int:
        """At most: as if in float32."""
        config = json.loads((folder / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4)

    def users(self, rows: int, adapters: int) -> list[LoadedAdapter | None]:
        """`rows` rows that share `adapters` adapters; 0: the base's."""
        return [self.adapters[i % adapters] if adapters else None for i in range(rows)]

    def time(self, x: Sequence[int], cases: Cases) -> Panel:
        """All of them in turn."""
        run = self.model.parts.runner.run
        calls: dict[str, Callable[[], object]] = {
            f"{name}/{at}": lambda batch=batch: run(batch)  # type: ignore[misc]
            for name, batches in cases.items()
            for at, batch in zip(x, batches, strict=True)
        }
        times = time_alternating(calls, self.rounds, self._clock)
        series = {name: [round(statistics.median(times[f"{name}/{at}"]) * 1e3, 3) for at in x] for name in cases}
        return {"x": list(x), "series": series}


def by_rows(growth: Growth) -> Panel:
    cases = {
        name: [decode_batch(growth.users(rows, adapters), CONTEXT) for rows in ALL_ROWS]
        for name, adapters in (("base", 0), ("one adapter", 1), ("16 adapters", 16))
    }
    return growth.time(ALL_ROWS, cases)


def by_context(growth: Growth) -> Panel:
    cases = {
        name: [decode_batch(growth.users(ROWS, adapters), keys) for keys in CONTEXTS]
        for name, adapters in (("base", 0), ("16 adapters", 16))
    }
    return growth.time(CONTEXTS, cases)


def by_adapters(growth: Growth) -> Panel:
    return growth.time(COUNTS, {"16 rows": [decode_batch(growth.users(ROWS, count), CONTEXT) for count in COUNTS]})


def by_rank(growth: Growth) -> Panel:
    """One rank after the other, each in turn with the base: all at once would not fit into memory."""
    base = decode_batch(growth.users(ROWS, 0), CONTEXT)
    series: dict[str, list[float]] = {"base": [], "16 adapters": []}
    for rank in ALL_RANKS:
        adapters = growth.model.load([rank] * NUM_ADAPTERS)
        found = growth.time([rank], {"base": [base], "16 adapters": [decode_batch(adapters, CONTEXT)]})
        for name, values in found["series"].items():
            series[name] += values
        growth.model.unload(adapters)
    return {"x": list(ALL_RANKS), "series": series}


def by_chunk(growth: Growth) -> Panel:
    cases = {
        name: [prefill_batch(growth.users(1, adapters), tokens) for tokens in CHUNKS]
        for name, adapters in (("base", 0), ("one adapter", 1))
    }
    return growth.time(CHUNKS, cases)


def registered_panel() -> Panel:
    """Microseconds, but for loads per request."""
    found = [registered.measure(count) for count in registered.COUNTS]
    return {"x": list(registered.COUNTS), "series": {name: [one[name] for one in found] for name in found[0]}}


PANELS: dict[str, Callable[[Growth], Panel]] = {
    "rows": by_rows,
    "context": by_context,
    "adapters": by_adapters,
    "rank": by_rank,
    "chunk": by_chunk,
}


if __name__ == "__main__":
    main()
