"""Times products by weights that stay packed beside bfloat16's, over shapes and row counts.

    python -m benchmarks.quantized_products [--dtype bfloat16] [--rows 1,4,16,256] [--threads 1] [--out FILE]

Every timing walks through copies of a weight that are larger than most caches together; the plain weight and the packed
ones in turn. A figure is the median over the rounds of the plain weight's time by the packed one's: above 1 is faster.
Codes are random; `int4 / 32` shares a scale between 32 inputs, `z` has zero points, `int8` and `fp8` have one scale an
output.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternating import CLOCKS, Clock, median_ratio, time_alternating
from benchmarks.products import settings_of
from benchmarks.report import RESULTS, machine
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.native import library
from lora_serve.model.native.coded_linear import code
from lora_serve.model.native.operators import PackedLinear, alone

SHAPES = {
    "135M output": LinearShape(576, 576),
    "135M gate, up": LinearShape(576, 3072),
    "135M down": LinearShape(1536, 576),
    "0.5B query, key, value": LinearShape(896, 1152),
    "0.5B gate, up": LinearShape(896, 9728),
    "0.5B down": LinearShape(4864, 896),
    "1B query, key, value": LinearShape(2048, 3072),
    "1B gate, up": LinearShape(2048, 16384),
    "1B down": LinearShape(8192, 2048),
}
ROWS = (1, 4, 16, 256)
WEIGHT_BYTES = 128_000_000  # of all copies of a plain weight
FEW_BYTES = 4_000_000  # for prompts, whose time is that of arithmetic
PLAIN = "plain"


def main(arguments: Sequence[str] | None = None) -> None:
    out = RESULTS / "quantized-products.json"
    asked = settings_of(arguments, __doc__, rows=list(ROWS), clock="processor", out=out)
    dtype = getattr(torch, asked.dtype)
    found = []
    for name, shape in SHAPES.items():
        for rows in asked.rows:
            found.append({"layer": name, **measured(shape, rows, dtype, asked.rounds, CLOCKS[asked.clock])})
            print(found[-1], flush=True)
    report = {
        "machine": machine(),
        "command": f"python -m benchmarks.quantized_products --dtype {asked.dtype} "
        f"--rows {','.join(map(str, asked.rows))} --threads {asked.threads} "
        f"--rounds {asked.rounds} --clock {asked.clock}",
        "level": library.description(dtype).level,
        "rows": found,
    }
    asked.out.write_text(json.dumps(report, indent=1) + "\n")


@torch.inference_mode()
def measured(shape: LinearShape, rows: int, dtype: torch.dtype, rounds: int, clock: Clock) -> dict[str, Any]:
    """Microseconds of the plain product, the bytes that it read a second, and the packed ones' speed by it."""
    size = shape.in_features * shape.out_features
    count = max(1, (WEIGHT_BYTES if rows <= 64 else FEW_BYTES) // (2 * size))
    x = torch.randn(rows, shape.in_features).to(dtype)
    kinds = {name: partial(walk, copies(make(shape, dtype), count), x) for name, make in MAKERS.items()}
    times = time_alternating(kinds, rounds, clock)
    plain = statistics.median(times[PLAIN]) / count
    ratios = {name: round(median_ratio(times[PLAIN], times[name]), 2) for name in kinds if name != PLAIN}
    shown = {"plain_us": round(1e6 * plain), "plain_gb_per_s": round(2e-9 * size / plain, 1)}
    return {"in": shape.in_features, "out": shape.out_features, "rows": rows, **shown, "speed": ratios}


def walk(weights: Sequence[PackedLinear], x: Tensor) -> None:
    for weight in weights:
        weight(x, None)


def copies(weight: PackedLinear, count: int) -> list[PackedLinear]:
    found = [weight]
    for _ in range(count - 1):
        panels = alone(weight.panels.shape, torch.int32)
        panels.copy_(weight.panels)
        found.append(replace(weight, panels=panels))
    return found


def plain(shape: LinearShape, dtype: torch.dtype) -> PackedLinear:
    return PackedLinear.of(torch.randn(shape.out_features, shape.in_features).bfloat16().to(dtype))


def coded(
    shape: LinearShape, dtype: torch.dtype, bits: int = 4, group: int | None = None, *, has_zeros: bool = False
) -> PackedLinear:
    """`bits`: 0 for FP8. A group that does not divide the inputs is half as long."""
    size = (shape.out_features, shape.in_features)
    if group is not None and shape.in_features % group:
        group //= 2
    groups = torch.arange(shape.in_features) // (group or shape.in_features)
    half, beside = 1 << bits - 1 if bits else 0, (shape.out_features, int(groups[-1]) + 1)
    codes = torch.randint(-half, half, size, dtype=torch.int8) if bits else torch.randn(size).to(torch.float8_e4m3fn)
    zeros = torch.randint(-half, half, beside, dtype=torch.int8) if has_zeros else None
    found = code(codes, torch.rand(beside).half(), zeros, groups, dtype)
    assert found is not None
    return found


MAKERS: Mapping[str, Callable[[LinearShape, torch.dtype], PackedLinear]] = {
    PLAIN: plain,
    "int8": partial(coded, bits=8),
    "int8 / 128 z": partial(coded, bits=8, group=128, has_zeros=True),
    "int4 / 128": partial(coded, group=128),
    "int4 / 128 z": partial(coded, group=128, has_zeros=True),
    "int4 / 32": partial(coded, group=32),
    "int4 / 32 z": partial(coded, group=32, has_zeros=True),
    "fp8": partial(coded, bits=0),
}


if __name__ == "__main__":
    main()
