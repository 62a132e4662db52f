"""Decode steps of the newer kinds of bases beside their floors: experts, latent attention, keys shared by layers.

    python -m benchmarks.newer_shapes [--shapes gpt-oss ...] [--dtypes bfloat16 ...] [--clock processor] [--before F]

Random weights in the proportions of large models (`lora_serve.random_weights`), 16 rows of 200 keys; without adapters,
and with four adapters (ranks 8, 16, 32, 8) on all linear layers of attention. The floor is that of benchmarks/step.py,
and the weights of the experts that the rows chose in that very step, counted, over the read bandwidth, at the two bytes
a number in which the checkpoint holds them. Cases, products and the reading of a large tensor, which tells the
bandwidth, alternate; medians of the rounds' ratios. The bandwidth is that of a tensor where torch puts it, as in
benchmarks/step.py, and besides that of one in huge pages, which on virtual machines is up to twice as high.
`--before`: a file of the same shapes, whose ratios are noted beside.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.alternating import CLOCK_HELP, CLOCKS, Clock, median_ratio, time_alternating
from benchmarks.checkpoints import make_checkpoints
from benchmarks.report import RESULTS, machine
from benchmarks.step import DTYPES, operators
from benchmarks.step_floor import gemms_of
from benchmarks.step_model import RANKS, LoadedAdapter, StepModel, blocks_of, decode_batch
from lora_serve.core.batch import Batch
from lora_serve.model.base_model import BaseModel
from lora_serve.model.experts import expert_modules
from lora_serve.model.system.process import advise_huge_pages

SHAPES = ("gpt-oss", "gemma4", "qwen3-moe", "deepseek-v3", "glm4-moe-lite")
ROWS, CONTEXT, NUM_ADAPTERS, STORED_BYTES = 16, 200, 4, 2
READ_BYTES = 2**28  # at once
READINGS = PLAIN, FAST = "a plain tensor", "one in huge pages"
ATTENTION = "self_attn"
BASE, ADAPTED = "base", "4 adapters"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--clock", choices=list(CLOCKS), default="processor", help=CLOCK_HELP)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"), help="folder of checkpoints")
    parser.add_argument("--before", type=Path, help="a file of this benchmark, of the commit before")
    parser.add_argument("--operators", action="store_true", help="torch's own operators by their time, too")
    parser.add_argument("--out", type=Path, default=RESULTS / "newer-shapes.json")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    report: dict[str, Any] = {
        "machine": machine(),
        "command": f"OMP_NUM_THREADS={threads} python -m benchmarks.newer_shapes --rounds {options.rounds} "
        f"--clock {options.clock}",
        "threads": threads,
        "clock": options.clock,
        "rows": ROWS,
        "context": CONTEXT,
        "rounds": options.rounds,
        "shapes": {},
    }
    before = json.loads(options.before.read_text())["shapes"] if options.before else {}
    for shape in options.shapes:
        folder, _ = make_checkpoints(options.cache, shape, 0, 0)
        for dtype in options.dtypes:
            name = f"{shape}, {dtype}"
            found = measure(folder, dtype, options.rounds, CLOCKS[options.clock], with_operators=options.operators)
            for case, figures in found["cases"].items():
                if (old := before.get(name)) is not None:
                    figures["before_ms"] = old["cases"][case]["ms"]
                    figures["before_over_floor"] = old["cases"][case]["step_over_floor"]
                print(name, case, figures)
            report["shapes"][name] = found
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            gc.collect()


def measure(folder: Path, dtype: str, rounds: int, clock: Clock, *, with_operators: bool = False) -> dict[str, Any]:
    """The figures of one shape and type."""
    model = StepModel(folder, NUM_ADAPTERS, 2**29, dtype)
    adapters = model.load([RANKS[i % len(RANKS)] for i in range(NUM_ADAPTERS)], lambda path: ATTENTION in path)
    model.touch(ROWS * blocks_of(CONTEXT))
    users: dict[str, list[LoadedAdapter | None]] = {
        BASE: [None] * ROWS, ADAPTED: [adapters[i % NUM_ADAPTERS] for i in range(ROWS)]
    }  # fmt: skip
    batches = {name: decode_batch(used, CONTEXT) for name, used in users.items()}
    run = model.parts.runner.run
    calls = {name: lambda batch=batch: run(batch) for name, batch in batches.items()}  # type: ignore[misc]
    tensors = {reading: _tensor(is_huge=reading == FAST) for reading in READINGS}
    others = {"products": gemms_of(model, batches[BASE]), **{name: tensor.sum for name, tensor in tensors.items()}}
    times = time_alternating({**calls, **others}, rounds, clock)
    cases = {}
    for name, batch in batches.items():
        chosen, expert_bytes = experts_of(model, batch)
        own = [one for one in users[name] if one is not None]
        floor_bytes = model.decode_floor_bytes(ROWS, CONTEXT, own) + expert_bytes
        floor, fast = (_floors(times, reading, floor_bytes) for reading in READINGS)
        cases[name] = {
            "ms": _ms(times[name]),
            "floor_ms": _ms(floor),
            "step_over_floor": round(median_ratio(times[name], floor), 3),
            "step_over_fast_floor": round(median_ratio(times[name], fast), 3),
            "products_ms": _ms(times["products"]),
            "experts_read": chosen,
            "expert_bytes": expert_bytes,
            "other_bytes": floor_bytes - expert_bytes,
        }
    speeds = {name: round(READ_BYTES / statistics.median(times[name])) for name in READINGS}
    found = {"read_bytes_per_second": speeds, "weights": _num_weights(folder), "cases": cases}
    return found | ({"operators": operators(calls[BASE])} if with_operators else {})


def _floors(times: Mapping[str, Sequence[float]], reading: str, num_bytes: int) -> list[float]:
    """Seconds of each round: the products, and bytes at the speed of that round's reading."""
    pairs = zip(times["products"], times[reading], strict=True)
    return [products + num_bytes * seconds / READ_BYTES for products, seconds in pairs]


def _tensor(*, is_huge: bool) -> torch.Tensor:
    """Numbers to be read, where torch puts them, or in huge pages."""
    found = torch.empty(READ_BYTES // 4)
    if is_huge:
        advise_huge_pages(found)
    return found.fill_(1.0)


def experts_of(model: StepModel, batch: Batch) -> tuple[list[int], int]:
    """How many experts of each layer the rows of a step choose, and the bytes of their weights in the checkpoint."""
    with _choices(model) as choices:
        model.parts.runner.run(batch)
    counts = [len(experts.unique()) for _, experts in choices]
    sizes = [sum(shape[1:].numel() for shape in _stacks(part)) for part, _ in choices]
    return counts, STORED_BYTES * sum(count * size for count, size in zip(counts, sizes, strict=True))


def _stacks(part: Any) -> list[torch.Size]:
    weights = (getattr(part, name, None) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return [torch.Size(weight.shape) for weight in weights if weight is not None]


@contextlib.contextmanager
def _choices(model: StepModel) -> Iterator[list[tuple[nn.Module, torch.Tensor]]]:
    """Every call of a module of experts in the block, with the experts chosen."""
    base: BaseModel = model.parts.fold.keywords["base"]  # type: ignore[attr-defined]
    found: list[tuple[nn.Module, torch.Tensor]] = []
    with contextlib.ExitStack() as hooks:
        for part in expert_modules(base.module):
            hooks.enter_context(part.register_forward_pre_hook(lambda own, given: found.append((own, given[1]))))
        yield found


def _num_weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // STORED_BYTES


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


if __name__ == "__main__":
    main()
