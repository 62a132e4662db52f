"""Times the frozen products over shapes and row counts: this project's own against oneDNN's prepacked weights.

    python -m benchmarks.products [--dtype bfloat16] [--rows 1,16,256] [--threads 1] [--clock processor] [--out FILE]

Every timing walks through copies of a weight that are larger than most caches together, so that weights come from
memory as they do in a model; ours and oneDNN's in turn, the medians of the rounds. Ours gives float32 sums, oneDNN
numbers of the inputs' type. LORA_SERVE_KERNELS=<level> times another level's kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import onednn
from benchmarks.alternating import CLOCK_HELP, CLOCKS, Clock, median_ratio, time_alternating
from benchmarks.report import machine
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.native import library
from lora_serve.model.native.operators import PackedLinear
from lora_serve.model.system.process import keep_freed_memory

SHAPES = {  # of a Llama with 135 million weights
    "query, key, value": LinearShape(576, 960),
    "attention output": LinearShape(576, 576),
    "gate, up": LinearShape(576, 3072),
    "down": LinearShape(1536, 576),
    "output head": LinearShape(576, 49152),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WEIGHT_BYTES = 60_000_000  # of all copies of a weight
LEAST_FLOPS = 4e8  # of a round: fewer are lost in the clock
MOST_OF_HEAD = 64  # rows: a step asks for few logits


def settings_of(arguments: Sequence[str] | None, words: str | None, **defaults: Any) -> argparse.Namespace:
    """What is asked of a benchmark of products, which `words` describe; threads and memory are set by it."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help=CLOCK_HELP)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(**defaults)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    keep_freed_memory()  # as the server does
    return asked


def main(arguments: Sequence[str] | None = None) -> None:
    asked = settings_of(arguments, __doc__, rows=list(ROWS))
    dtype = getattr(torch, asked.dtype)
    level = library.description(dtype).level
    print(f"{asked.dtype} by {level} kernels; GFLOP/s and GB/s of weights, ours and oneDNN's, and their ratio")
    found = []
    for name, shape in SHAPES.items():
        for rows in asked.rows:
            if name != "output head" or rows <= MOST_OF_HEAD:
                found.append({"layer": name, **measured(shape, rows, dtype, asked.rounds, CLOCKS[asked.clock])})
                print(line(found[-1]), flush=True)
    if asked.out is not None:
        report = {"machine": machine(), "dtype": asked.dtype, "level": level, "threads": asked.threads, "rows": found}
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


@torch.inference_mode()
def measured(shape: LinearShape, rows: int, dtype: torch.dtype, rounds: int, clock: Clock) -> dict[str, Any]:
    """Seconds of one product by ours and by oneDNN (None where it has none for this type), and how they compare."""
    num_weights = shape.in_features * shape.out_features
    num_copies = max(1, WEIGHT_BYTES // (num_weights * dtype.itemsize))
    times = max(1, int(LEAST_FLOPS / (2 * rows * num_weights * num_copies)))
    weights = [torch.randn(shape.out_features, shape.in_features).to(dtype) for _ in range(num_copies)]
    x = torch.randn(rows, shape.in_features).to(dtype)
    packed = [PackedLinear.of(weight) for weight in weights]
    cases = {"ours": partial(walk, [partial(one, x, None) for one in packed * times])}
    if onednn.can_prepack(weights[0]):
        prepacked = [onednn.prepack(weight) for weight in weights]
        cases["onednn"] = partial(walk, [partial(onednn.linear, x, one, None) for one in prepacked * times])
    taken = time_alternating(cases, rounds, clock)
    seconds = {name: statistics.median(found) / times / num_copies for name, found in taken.items()}
    return {
        "rows": rows,
        "flops": 2 * rows * num_weights,
        "weight_bytes": packed[0].panels.nbytes,
        "seconds": seconds,
        "onednn_by_ours": median_ratio(taken["onednn"], taken["ours"]) if "onednn" in taken else None,
    }


def walk(calls: Sequence[Callable[[], object]]) -> None:
    """Calls one after another; what each gives is freed before the next, as in a step."""
    for call in calls:
        call()


def line(found: dict[str, Any]) -> str:
    rates = [
        f"{found['flops'] / seconds / 1e9:7.1f} GFLOP/s {found['weight_bytes'] / seconds / 1e9:5.1f} GB/s"
        for seconds in found["seconds"].values()
    ]
    ratio = "" if found["onednn_by_ours"] is None else f"{found['onednn_by_ours']:.2f}"
    return f"{found['layer']:18} {found['rows']:4d} rows  " + "   ".join([*rates, ratio])


if __name__ == "__main__":
    main()
