"""The LoRA kernel's tiles on a GPU with other block sizes than those of `kernels/triton.py`.

    python -m benchmarks.gpu_tiles [--out FILE.json]

Microseconds of one layer, medians, by variant, rank and shape, for each of CASES (segments, tokens of each, adapters)
beside the time in which a large copy moves as many bytes. Every variant's result is held against the first one's.
Exits 3 without CUDA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_kernels import filled_layers, layer_bytes, layer_seconds
from benchmarks.gpu_step import copy_bandwidth, machine
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.kernels import create_kernel, triton
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraTokens

CASES = ((1, 512, 1), (8, 256, 8), (1, 2048, 1), (4, 2048, 4))
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
RANKS = (16, 64)
VARIANTS: tuple[dict[str, int], ...] = (
    {},
    {"_TILE_PART": 1 << 20},  # one program for all inputs
    {"_TILE_PART": 1024},
    {"_TILE_PART": 4096},
    {"_TILE_RANKS": 16},
    {"_TILE_RANKS": 64},
    {"_TILE_INPUTS": 128, "_SHRINK_TILE_STAGES": 3},
    {"_SHRINK_TILE_STAGES": 3},
    {"_TILE_OUTPUTS": 64},
    {"_TILE_OUTPUTS": 256, "_EXPAND_TILE_WARPS": 8},
    {"_EXPAND_TILE_WARPS": 8},
)
TOLERANCE = 0.01  # of the largest value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu-tiles.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_tiles: torch sees no CUDA device here", file=sys.stderr)
        return 3
    bandwidth = copy_bandwidth()
    found: dict[str, Any] = {"machine": machine(), "command": "python -m benchmarks.gpu_tiles", "cases": CASES}
    found["rows"] = rows = []
    for rank, shape in itertools.product(RANKS, SHAPES):
        floors = [layer_bytes(rank, LinearShape(*shape), *case) / bandwidth for case in CASES]
        copied = [round(1e6 * floor, 1) for floor in floors]
        rows.append({"rank": rank, "shape": shape, "variant": "copy", "us": copied})
        slots = filled_layers(LinearShape(*shape), rank, max(case[2] for case in CASES))
        wanted = None
        for variant in VARIANTS:
            us, result = measured(slots, shape, variant)
            wanted = result if wanted is None else wanted
            assert float((result - wanted).abs().max() / wanted.abs().max()) < TOLERANCE, variant
            rows.append({"rank": rank, "shape": shape, "variant": variant, "us": us})
            print(rows[-1], flush=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


@torch.inference_mode()
def measured(slots: LoraSlots, shape: tuple[int, int], variant: dict[str, int]) -> tuple[list[float], Tensor]:
    """Microseconds of each case, and the deltas [300 + 212 tokens, out] of two adapters."""
    with mock.patch.dict(vars(triton), variant):
        kernel = create_kernel("triton", slots)
        us = [round(1e6 * layer_seconds(kernel, slots, LinearShape(*shape), *case), 1) for case in CASES]
        torch.manual_seed(0)
        x = torch.randn(512, shape[0], device=slots.device, dtype=torch.bfloat16)
        y = torch.zeros(512, shape[1], device=slots.device, dtype=torch.bfloat16)
        kernel.add(y, x, (0,), LoraTokens.of([(300, 0, 1.0), (212, 1, 0.5)]).placed(slots.device))
        return us, y.float()


if __name__ == "__main__":
    sys.exit(main())
