"""A model with its adapters on a device, and the time of its steps: what the parts of `gpu_report` share."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_step import copy_bandwidth, floor_bytes, step_seconds
from benchmarks.gpu_world import World, load, make_world, mixed, random_adapter, with_experts
from lora_serve.core.batch import RowAdapter

WARM, STEPS = 6, 24


class House:
    """A world and its adapters, all of `--rank`."""

    def __init__(
        self, arguments: argparse.Namespace, num_rows: int, context: int, steps: int = WARM + STEPS, *,
        shape: str | None = None, of_experts: bool = False, ends: tuple[str, ...] = ("",), **world: Any,
    ) -> None:  # fmt: skip
        """`of_experts`: adapters add to all experts. `ends`: of the paths of the linear layers that adapters touch.
        `world`: as of `make_world`.
        """
        self.device = torch.device(arguments.device)
        num_slots, rank = min(64, num_rows), arguments.rank
        self.world: World = make_world(
            shape or arguments.shape, self.device, num_rows, context, steps, num_slots, **world
        )
        dtype = self.world.cache.shape.dtype
        made = [random_adapter(self.world.spec, f"d{i}", rank, self.device, dtype, ends) for i in range(num_slots)]
        self.adapter_bytes = made[0].num_bytes
        if of_experts:
            made = [with_experts(self.world, adapter, rank) for adapter in made]
            self.adapter_bytes += int((made[0].num_bytes - self.adapter_bytes) * self.world.chosen)
        self.adapters = [load(self.world, i, 1, adapter) for i, adapter in enumerate(made)]

    def rows(self, num_rows: int, num_adapters: int) -> list[RowAdapter | None]:
        """What each row uses."""
        return [self.adapters[i % num_adapters] if num_adapters else None for i in range(num_rows)]


def release() -> None:
    """Gives a model's memory back, whose parts refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str) -> float:
    """The median of a few calls, each waited for."""
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        work()
        synchronize(torch.device(device))
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def timed(house: House, num_rows: int, num_adapters: int, bandwidth: float) -> dict[str, float]:
    """One decode step beside its floor."""
    rows = house.rows(num_rows, num_adapters)
    seconds = statistics.median(step_seconds(house.world, lambda _: rows))
    num_bytes = floor_bytes(house.world, num_rows, num_adapters * house.adapter_bytes)
    return {
        "step_ms": round(seconds * 1e3, 3),
        "floor_ms": round(num_bytes / bandwidth * 1e3, 3),
        "ratio": round(seconds * bandwidth / num_bytes, 3),
        "tokens_per_s": round(num_rows / seconds, 1),
    }


def with_prompt(house: House, chunk: int, num_adapters: int) -> dict[str, float]:
    """63 rows that decode, and a chunk of one prompt."""
    rows = house.rows(64, num_adapters)
    times = []
    for number in range(WARM + STEPS // 2):
        begun = time.perf_counter()
        outputs = house.world.runner.run(mixed(house.world, number, rows, chunk))
        times.append(time.perf_counter() - begun)
        assert all(output.error is None for output in outputs), outputs
    return {"step_ms": round(statistics.median(times[WARM:]) * 1e3, 3)}


def bytes_per_second(device: str) -> float:
    return copy_bandwidth() if device == "cuda" else 1e10  # a CPU's trial needs no true one


def long_row(arguments: argparse.Namespace, context: int, bandwidth: float) -> dict[str, float]:
    """A decode step of one row behind a long context."""
    return timed(House(arguments, num_rows=1, context=context, steps=WARM + STEPS), 1, 0, bandwidth)
