"""Times the LoRA kernels and the frozen base layer over shapes, row counts and dtypes.

    python -m benchmarks.lora_kernels [--out FILE.json]

Every timing walks through LAYERS copies of the layer, so that weights come from memory and not from the last cache,
as they do in a model. Microseconds per layer, median of ROUNDS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.report import machine
from lora_serve.core.batch import SlotRef
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta
from lora_serve.model.lora.kernels import create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraSegment, LoraTokens

LAYERS, ROUNDS, NUM_SLOTS = 24, 7, 16
SHAPES = (LinearShape(576, 576), LinearShape(576, 1536), LinearShape(896, 4864))
RANKS = (8, 16, 32)
DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lora-kernels.json"))
    arguments = parser.parse_args()
    rows = [row for shape in SHAPES for row in (*base_rows(shape), *decode_rows(shape), *segment_rows(shape))]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


@torch.inference_mode()
def base_rows(shape: LinearShape) -> list[dict[str, Any]]:
    """The frozen layer in float32: torch's F.linear against the layout that FrozenLinear chooses."""
    plain = [nn.Linear(shape.in_features, shape.out_features, bias=False) for _ in range(LAYERS)]
    frozen = [FrozenLinear(layer) for layer in plain]
    found = []
    for tokens in (1, 4, 16, 64, 256):
        x = torch.randn(tokens, shape.in_features)
        times = {
            "F.linear": median_us(lambda x=x: [F.linear(x, layer.weight) for layer in plain]),
            "frozen": median_us(lambda x=x: [layer(x) for layer in frozen]),
        }
        found.append(said("base", shape, tokens=tokens, **times))
    return found


def decode_rows(shape: LinearShape) -> list[dict[str, Any]]:
    """One token per row: 16 rows of 16 adapters, of 4, of one; ranks 8, 16 and 32 mixed."""
    found = []
    for dtype in DTYPES:
        slots = filled(shape, dtype)
        for popularity, modulus in (("distinct", 16), ("uniform over 4", 4), ("identical", 1)):
            tokens = LoraTokens.of([(1, row % modulus) for row in range(16)])
            num_bytes = sum(
                module.a.nbytes + module.b.nbytes
                for slot in range(modulus)
                if (module := slots.delta(0, slot)) is not None
            )
            times = both_kernels(slots, tokens, shape)
            limit = {"adapter_bytes": num_bytes}
            found.append(said("decode", shape, dtype=str(dtype), popularity=popularity, **times, **limit))
    return found


def segment_rows(shape: LinearShape) -> list[dict[str, Any]]:
    """One adapter over segments of growing length, each kernel forced: where the matrix product begins to win."""
    found = []
    for dtype in DTYPES:
        slots = filled(shape, dtype)
        for length in (1, 2, 4, 8, 16, 64):
            segments = tuple(LoraSegment(i * length, (i + 1) * length, i) for i in range(4))
            each = torch.tensor([segment.slot for segment in segments for _ in range(length)], dtype=torch.int32)
            short = LoraTokens(segments, (), each, None)
            found.append(
                said(
                    "segments of 4 adapters",
                    shape,
                    dtype=str(dtype),
                    length=length,
                    **both_kernels(slots, short, shape),
                )
            )
    return found


def both_kernels(slots: LoraSlots, tokens: LoraTokens, shape: LinearShape) -> dict[str, float]:
    x = torch.randn(tokens.num_tokens, shape.in_features)
    y = torch.zeros(tokens.num_tokens, shape.out_features)
    times = {}
    for name in ("loop", "native"):
        kernel = create_kernel(name, slots)
        times[name] = median_us(lambda kernel=kernel: [kernel.add(y, x, (module,), tokens) for module in range(LAYERS)])
    return times


def filled(shape: LinearShape, dtype: torch.dtype) -> LoraSlots:
    """LAYERS modules of one shape; slot i has an adapter of rank 8, 16 or 32."""
    names = [f"layer{index}" for index in range(LAYERS)]
    slots = LoraSlots(dict.fromkeys(names, shape), NUM_SLOTS, torch.device("cpu"))
    for index in range(NUM_SLOTS):
        rank = RANKS[index % len(RANKS)]
        modules = {
            name: LinearDelta(
                torch.randn(rank, shape.in_features).to(dtype), torch.randn(rank, shape.out_features).to(dtype), 1e-3
            )
            for name in names
        }
        slots.load(SlotRef(index, 1, f"d{index}"), HostAdapter(f"d{index}", rank, modules))
    return slots


def median_us(work: Callable[[], object]) -> float:
    """Microseconds per layer."""
    work()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) / LAYERS * 1e6)
    return round(statistics.median(times), 1)


def said(what: str, shape: LinearShape, **facts: Any) -> dict[str, Any]:
    row = {"what": what, "shape": f"{shape.in_features} -> {shape.out_features}", **facts}
    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
