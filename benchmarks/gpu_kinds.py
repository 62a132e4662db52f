"""Other kinds of bases on a GPU, and what a plain model takes: parts of `gpu_report`."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import StaticCache

from benchmarks.gpu_house import STEPS, WARM, House, bytes_per_second, release, seconds_of, timed
from benchmarks.gpu_world import random_model

if TYPE_CHECKING:
    from benchmarks.gpu_report import Report

POINTS = ((1, 0), (1, 1), (16, 0), (16, 16), (64, 0), (64, 64))  # rows, different adapters
OF_KINDS: dict[str, dict[str, Any]] = {  # what is timed -> how its world is made
    "experts": {"shape": "moe"},
    "experts with LoRA": {"shape": "moe", "of_experts": True},
    "as many products in a dense base": {"shape": "dense"},
    "experts by transformers, without graphs": {"shape": "moe", "joined": False, "graphs": False},
    "FP8": {"float8": True},
}
ROWS = (1, 16, 64)
_LEFT = 64 * 2**20  # bytes that a capture finds


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def kinds(report: Report, arguments: argparse.Namespace) -> None:
    """Decode steps of experts, of FP8 and of a plain model. On a CPU only what runs there, and tiny."""
    is_cuda = arguments.device == "cuda"
    bandwidth = bytes_per_second(arguments.device)
    for name, world in OF_KINDS.items():
        given = dict(world)
        if not is_cuda:
            given |= {"shape": f"tiny-{given['shape']}"} if "shape" in given else {}
            # Triton's interpreter, where it is on, runs experts and what is added to them: seconds a step
            given |= {"lora_kernel": "triton"} if "of_experts" in given and is_interpreted() else {}
        houses: list[House] = []
        points = [at for at in POINTS if at[1] or "LoRA" not in name][: None if is_cuda else 2]
        for num_rows, num_adapters in points:
            words = f"{name}: {num_rows} rows, {num_adapters} adapters"
            report.add("kinds", words, partial(_timed, houses, arguments, given, num_rows, num_adapters, bandwidth))
        del houses
        release()
    for num_rows in ROWS if is_cuda else ROWS[:1]:
        report.add("kinds", f"a plain model compiled by torch: {num_rows} rows", partial(_plain, arguments, num_rows))


def _timed(
    houses: list[House], arguments: argparse.Namespace, world: dict[str, Any], num_rows: int, num_adapters: int,
    bandwidth: float,
) -> dict[str, float]:  # fmt: skip
    """The first figure of a kind makes its world, so that a failure or a lack of time is noted as that of a figure."""
    if not houses:
        houses.append(House(arguments, 64, 512, WARM + STEPS if arguments.device == "cuda" else 2, **world))
    found = timed(houses[0], num_rows, num_adapters, bandwidth)
    graphs = houses[0].world.runner._graphs  # noqa: SLF001 - whether steps were captured belongs to the figure
    return {**found, "captured": 0 if graphs is None else graphs.stats().num_replayed}


@torch.inference_mode()
def _plain(arguments: argparse.Namespace, num_rows: int, context: int = 512) -> dict[str, float]:
    """transformers' own model with its static cache, compiled as a whole where there is a GPU: one token a row."""
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(arguments.shape, device, dtype)
    model.set_attn_implementation("sdpa")
    cache = StaticCache(config=model.config, max_cache_len=context + 64)
    ids = torch.full((num_rows, context), 7, device=device)
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    forward = torch.compile(model, mode="reduce-overhead") if device.type == "cuda" else model
    place = torch.full((num_rows, 1), context, device=device)

    def step() -> Any:
        return forward(input_ids=ids[:, :1], position_ids=place, past_key_values=cache).logits.argmax(-1)

    for _ in range(4):
        step()
    return {"step_ms": round(seconds_of(step, arguments.device) * 1e3, 3)}


def capture_without_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """A first capture that finds no memory bars its size alone: the step is computed, and others are captured later."""
    house = House(arguments, num_rows=64, context=64, steps=8)
    runner, graphs = house.world.runner, house.world.runner._graphs  # noqa: SLF001
    assert graphs is not None
    runner.run(house.world.batch(0, house.rows(1, 0)))
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(max(0, free - _LEFT), dtype=torch.uint8, device=house.device)
    try:
        runner.run(house.world.batch(0, house.rows(64, 0)))
        words = "computed all the same"
    except Exception as error:  # what such a step says is the figure
        words = f"{type(error).__name__}: {str(error)[:200]}"
    del held
    release()
    first = graphs.stats()
    errors = [output.error for output in runner.run(house.world.batch(1, house.rows(64, 0)))]
    errors += [output.error for output in runner.run(house.world.batch(1, house.rows(16, 0)))]
    last = graphs.stats()
    return {
        "the step without memory": words,
        "failed captures": first.num_failed,
        "errors afterwards": sum(error is not None for error in errors),
        "captured afterwards": last.num_captured - first.num_captured,
    }
