"""The decode step on a GPU beside its floor.

    python -m benchmarks.gpu_step [--shape 8b] [--rank 16] [--context 512] [--out FILE.json]

Random weights, bfloat16. One step's floor is the time in which a large copy moves as many bytes as the step must read:
weights without the embedding, the different adapters of the batch, K and V. Milliseconds of the whole step, from
Python rows to Python token ids, medians. Exits 3 without CUDA.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_kernels import kernel_table
from benchmarks.gpu_world import SHAPES, World, load, make_world, random_adapter
from lora_serve.core.batch import RowAdapter
from lora_serve.model.lora.host_adapter import in_arena

ROWS, STEPS, WARM = 64, 60, 10
MIXES = ((1, 0), (1, 1), (16, 0), (16, 1), (16, 16), (64, 0), (64, 1), (64, 64))  # rows, different adapters
ZIPF, LIFETIME, SLOTS, ARENAS = 1.1, 64, 128, 16  # LIFETIME: steps until a row ends and another adapter's begins


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu-step.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_step: torch sees no CUDA device here", file=sys.stderr)
        return 3
    bandwidth = copy_bandwidth()
    shape = {name: value for name, value in vars(arguments).items() if name != "out"}
    found: dict[str, Any] = {"machine": machine(), "command": "scripts/gpu_check", "arguments": shape}
    found["copy_gb_per_s"] = round(bandwidth / 1e9, 1)
    tables: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "steps": lambda: step_table(arguments, bandwidth, torch.device("cuda"), graphs=True),
        "steps_without_graphs": lambda: step_table(arguments, bandwidth, torch.device("cuda"), graphs=False),
        "registered": lambda: registered_table(arguments),
        "kernels": lambda: kernel_table(arguments.rank, bandwidth),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():  # written after each, so that a failure loses none of those before it
        gc.collect()  # the model of the table before, whose parts refer to each other
        torch.cuda.empty_cache()
        found[name] = table()
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def step_table(
    arguments: argparse.Namespace, bandwidth: float, device: torch.device, *, graphs: bool
) -> list[dict[str, Any]]:
    """One line per mix of rows and adapters."""
    world = make_world(
        arguments.shape, device, ROWS, arguments.context, STEPS + WARM, ROWS, block_size=arguments.block_size,
        graphs=graphs,
    )  # fmt: skip
    dtype = world.cache.shape.dtype
    made = [random_adapter(world.spec, f"d{i}", arguments.rank, device, dtype) for i in range(ROWS)]
    adapters = [load(world, i, 1, adapter) for i, adapter in enumerate(made)]
    rows = []
    for num_rows, num_adapters in MIXES:
        chosen = [adapters[i % num_adapters] if num_adapters else None for i in range(num_rows)]
        seconds = statistics.median(step_seconds(world, lambda _, chosen=chosen: chosen))
        num_bytes = floor_bytes(world, num_rows, num_adapters * made[0].num_bytes)
        row = {
            "rows": num_rows,
            "adapters": num_adapters,
            "step_ms": round(seconds * 1e3, 3),
            "floor_ms": round(num_bytes / bandwidth * 1e3, 3),
            "ratio": round(seconds * bandwidth / num_bytes, 3),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def floor_bytes(world: World, num_rows: int, adapter_bytes: int) -> int:
    """What one step must read."""
    return world.weight_bytes(num_rows) + world.kv_bytes(num_rows) + adapter_bytes


def step_seconds(world: World, adapters_of: Callable[[int], list[RowAdapter | None]]) -> list[float]:
    """Of every step after the first WARM, of the last one at least. `adapters_of`: what each row uses in a step; loads
    count as its time.
    """
    times = []
    for step in range(world.steps):
        start = time.perf_counter()
        outputs = world.runner.run(world.batch(step, adapters_of(step)))
        times.append(time.perf_counter() - start)
        assert all(output.error is None for output in outputs), outputs
    return times[min(WARM, len(times) - 1) :]


def registered_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows come and go with adapters drawn by Zipf's law: 8 registered, and 1 000 over SLOTS slots."""
    device = torch.device("cuda")
    world = make_world(arguments.shape, device, ROWS, arguments.context, 400, SLOTS, block_size=arguments.block_size)
    cpu = torch.device("cpu")
    hosts = [
        in_arena(random_adapter(world.spec, f"d{i}", arguments.rank, cpu, torch.bfloat16), world.spec.linears, pin=True)
        for i in range(ARENAS)
    ]
    rows = []
    for num_registered in (8, 1000):
        traffic = Traffic(world, hosts, num_registered)
        seconds = step_seconds(world, traffic.adapters)
        row = {
            "registered": num_registered,
            "mean_step_ms": round(statistics.mean(seconds) * 1e3, 3),
            "p99_step_ms": round(sorted(seconds)[int(len(seconds) * 0.99)] * 1e3, 3),
            "loads": traffic.num_loads,
        }
        rows.append(row)
        print(row, flush=True)
    return rows


class Traffic:
    """Which adapter each row uses: slots hold those used last; a host adapter stands for many registered ones."""

    def __init__(self, world: World, hosts: list[Any], num_registered: int) -> None:
        self._world, self._hosts = world, hosts
        weights = [1 / rank**ZIPF for rank in range(1, num_registered + 1)]
        self._sums = list(itertools.accumulate(weights))
        self._random = random.Random(0)
        self._slots: OrderedDict[int, RowAdapter] = OrderedDict()
        self._rows = [self._draw() for _ in range(ROWS)]
        self.num_loads = 0

    def adapters(self, step: int) -> list[RowAdapter | None]:
        for i in range(ROWS):
            if (step + i) % LIFETIME == 0:
                self._rows[i] = self._draw()
        for adapter in self._rows:
            if adapter in self._slots:
                self._slots.move_to_end(adapter)
        return [self._slot_of(adapter) for adapter in self._rows]

    def _draw(self) -> int:
        return bisect.bisect_left(self._sums, self._random.random() * self._sums[-1])

    def _slot_of(self, adapter: int) -> RowAdapter:
        if adapter not in self._slots:
            free = len(self._slots)
            index = free if free < SLOTS else self._slots.popitem(last=False)[1].slot.index
            self.num_loads += 1
            self._slots[adapter] = load(self._world, index, self.num_loads, self._hosts[adapter % len(self._hosts)])
        self._slots.move_to_end(adapter)
        return self._slots[adapter]


def copy_bandwidth() -> float:
    """Bytes per second of a copy within the device's memory, read and written bytes both counted."""
    source = torch.randint(255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


def machine() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "transformers", "triton")}
    today = datetime.now(UTC).date().isoformat()
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), **packages, "date": today}


if __name__ == "__main__":
    sys.exit(main())
