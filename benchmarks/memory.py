"""What steps need of the device's memory, measured beside the estimate that decides whether they are composed.

    python -m benchmarks.memory [--model FOLDER] [--device cpu] [--out FILE.json]

Steps of several shapes on the real runner, without HTTP: bytes that torch had allocated at the peak beside weights, KV
and adapters (on CUDA by its allocator's own count, else by its profiler's), the estimate, and their ratio. Every second
row has an adapter of its own. At last the process: weights, KV and the largest step together, against what it took.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine
from lora_serve.adapters.checkpoint.saved import dummy_adapter
from lora_serve.commands.demo import DATA
from lora_serve.core.batch import Batch, Row, RowAdapter, SampleInput, SlotRef, memory_load
from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.request import SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.system.device_memory import peak_bytes

NUM_ADAPTERS = 8
Shape = tuple[tuple[int, int], ...]  # per row: tokens of the step, keys with those


def shapes(max_model_len: int, max_tokens: int) -> dict[str, Shape]:
    """Name -> rows; prompts as long as the model and the step allow."""
    long = max_model_len
    most = min(max_tokens, long)
    return {
        "1 row decodes, 64 keys": ((1, 64),),
        "16 rows decode, 64 keys": ((1, 64),) * 16,
        f"16 rows decode, {long} keys": ((1, long),) * 16,
        f"16 rows decode, one of {long} keys": ((1, long), *((1, 16),) * 15),
        f"a prompt of {most}": ((most, most),),
        f"8 prompts of {most // 8}": ((most // 8, most // 8),) * 8,
        f"the last {most // 2} of a prompt of {long}": ((most // 2, long),),
        f"8 rows decode beside a chunk of {most - 8}": (*((1, 128),) * 8, (most - 8, most - 8)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DATA / "model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory.json"))
    arguments = parser.parse_args()
    settings = Settings(model=str(arguments.model), device=arguments.device)
    parts = build_model(settings.part(ModelConfig), settings.part(EngineConfig), NUM_ADAPTERS)
    slots = load_adapters(parts)
    found = [
        measured(parts, name, shape, slots)
        for name, shape in shapes(parts.spec.max_model_len, settings.max_num_batched_tokens).items()
    ]
    whole = whole_process(parts, max(entry["estimate"] for entry in found), slots)
    for entry in found:
        print(f"{entry['step']:45} {entry['measured']:12,} {entry['estimate']:12,} {entry['ratio']:6.2f}")
    print(json.dumps(whole))
    result = {
        "machine": machine(),
        "model": arguments.model.name,
        "device": parts.spec.device,
        "dtype": parts.spec.dtype,
        "activation_bytes": {
            name: round(getattr(parts.memory.activations, name), 1)
            for name in type(parts.memory.activations).__dataclass_fields__
        },
        "steps": found,
        "process": whole,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def load_adapters(parts: ModelParts) -> list[SlotRef]:
    """Adapters of zeros: what they change costs the same memory."""
    host = parts.fold(dummy_adapter(parts.spec))
    slots = [SlotRef(index, 1, f"benchmark-{index}") for index in range(NUM_ADAPTERS)]
    for slot in slots:
        parts.runner.load_slot(slot, replace(host, digest=slot.digest))
    return slots


def measured(parts: ModelParts, name: str, shape: Shape, slots: list[SlotRef]) -> dict[str, Any]:
    """Bytes; the second of two equal steps, as some things are allocated once and kept."""
    batch = batch_of(parts, shape, slots)
    device = torch.device(parts.spec.device)
    parts.runner.run(batch)
    peak = peak_bytes(device, lambda: parts.runner.run(batch))
    estimate = parts.memory.activations.num_bytes(memory_load(batch.rows))
    return {"step": name, "measured": peak, "estimate": estimate, "ratio": round(estimate / peak, 2)}


def batch_of(parts: ModelParts, shape: Shape, slots: list[SlotRef]) -> Batch:
    """Rows that share their blocks: the answers do not matter here."""
    sample = SampleInput(SamplingParams(temperature=0.8, top_p=0.9), 0, 0, ())
    block_size = Settings.model_fields["block_size"].default
    rows = tuple(
        Row(
            index,
            tuple((index + i) % parts.spec.vocab_size for i in range(count)),
            keys - count,
            tuple(1 + i % parts.num_blocks for i in range(-(-keys // block_size))),
            (RowAdapter(slots[index // 2 % len(slots)]),) if index % 2 else (),
            sample,
            None,
        )
        for index, (count, keys) in enumerate(shape)
    )
    return Batch(rows, ())


def whole_process(parts: ModelParts, largest_step: int, slots: list[SlotRef]) -> dict[str, int]:
    """Bytes. The KV pool is mapped as it is used on a CPU, so there the estimate counts more of it than was touched."""
    adapters = len(slots) * parts.fold(dummy_adapter(parts.spec)).num_bytes
    memory = parts.memory
    estimate = memory.weight_bytes + memory.kv_bytes + adapters + largest_step
    return {
        "weights": memory.weight_bytes,
        "kv": memory.kv_bytes,
        "adapters": adapters,
        "largest_step": largest_step,
        "estimate": estimate,
        "measured": memory.measured_peak(),
    }


if __name__ == "__main__":
    main()
