"""The LoRA delta of one linear layer on a GPU, beside the bytes it must read."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from lora_serve.core.batch import SlotRef
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta
from lora_serve.model.lora.kernels import create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import LoraTokens

_SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))
_CASES = (
    (1, 1, 1),
    (16, 1, 16),
    (64, 1, 64),
    (64, 1, 1),
    (1, 512, 1),
    (8, 256, 8),
)  # segments, tokens of each, adapters
_LAYERS, _ROUNDS = 16, 11


@torch.inference_mode()
def kernel_table(rank: int, bandwidth: float) -> list[dict[str, Any]]:
    """Microseconds per layer, medians; every call has a layer of its own, so weights come from memory."""
    rows = []
    for shape in _SHAPES:
        slots = filled_layers(LinearShape(*shape), rank, max(case[2] for case in _CASES))
        kernel = create_kernel("triton", slots)
        for segments, length, adapters in _CASES:
            seconds = layer_seconds(kernel, slots, LinearShape(*shape), segments, length, adapters)
            num_bytes = layer_bytes(rank, LinearShape(*shape), segments, length, adapters)
            rows.append(
                {
                    "shape": f"{shape[0]} -> {shape[1]}",
                    "segments": segments,
                    "tokens_each": length,
                    "adapters": adapters,
                    "us": round(seconds * 1e6, 2),
                    "floor_us": round(num_bytes / bandwidth * 1e6, 2),
                }
            )
            print(rows[-1], flush=True)
    return rows


def layer_bytes(rank: int, shape: LinearShape, segments: int, length: int, adapters: int) -> int:
    """What a layer must read and write in bfloat16: the adapters, x, and y twice."""
    weights = adapters * rank * (shape.in_features + shape.out_features)
    return 2 * (weights + segments * length * (shape.in_features + 2 * shape.out_features))


def layer_seconds(
    kernel: Any, slots: LoraSlots, shape: LinearShape, segments: int, length: int, adapters: int
) -> float:
    """Of `segments` segments of `length` tokens, whose adapters take turns, on `filled_layers`."""
    tokens = LoraTokens.of((length, i % adapters, 1.0) for i in range(segments)).placed(slots.device)
    x = torch.randn(segments * length, shape.in_features, device=slots.device, dtype=torch.bfloat16)
    y = torch.zeros(segments * length, shape.out_features, device=slots.device, dtype=torch.bfloat16)
    return _replayed(lambda: [kernel.add(y, x, (module,), tokens) for module in range(_LAYERS)]) / _LAYERS


def filled_layers(shape: LinearShape, rank: int, num_slots: int) -> LoraSlots:
    """Layers of one shape with an adapter of random weights in every slot."""
    device = torch.device("cuda")
    names = [f"layer{i}" for i in range(_LAYERS)]
    slots = LoraSlots(dict.fromkeys(names, shape), num_slots, device)
    for index in range(num_slots):
        deltas = {
            name: LinearDelta(
                torch.randn(rank, shape.in_features, device=device, dtype=torch.bfloat16),
                torch.randn(rank, shape.out_features, device=device, dtype=torch.bfloat16),
                1e-3,
            )
            for name in names
        }
        slots.load(SlotRef(index, 1, f"d{index}"), HostAdapter(f"d{index}", rank, deltas))
    return slots


def _replayed(work: Any) -> float:
    """Seconds of one replay of what `work` launches."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
