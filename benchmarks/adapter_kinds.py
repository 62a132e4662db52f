"""What one row of another kind of adapter costs the plain LoRA rows beside it.

Decode steps of a Llama shape of about 135M (random weights, float32): 16 rows of 16 adapters of rank 16 at 200 tokens
of context; then the same with one of the rows replaced by a row of another kind. A plain row may lose no more than
that row costs by itself, which is measured as one row of the kind against one plain row. Steps of all cases alternate
in one run; medians of the differences between neighbouring steps. Writes benchmarks/results/adapter-kinds.json.

    python -m benchmarks.adapter_kinds [--steps 40] [--shape 135m|tiny]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.checkpoints import SHAPES, make_checkpoints
from benchmarks.report import machine
from lora_serve.adapters.checkpoint.saved import SavedAdapter, SavedEmbedding, SavedLinear, SavedTokens
from lora_serve.core.batch import Batch, Row, RowAdapter, SampleInput, SlotRef
from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.model.build import ModelParts, build_model

NUM_ROWS, RANK, CONTEXT, BLOCK_SIZE = 16, 16, 200, 16
RESULT = Path(__file__).parent / "results" / "adapter-kinds.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shape", choices=list(SHAPES), default="135m")
    options = parser.parse_args()
    model, _ = make_checkpoints(Path(".benchmarks"), options.shape, 0, 0)
    settings = Settings(model=str(model), dtype="float32", kv_cache_memory="300MiB", block_size=BLOCK_SIZE)
    kinds = list(adapters_of_each_kind(small_spec()))
    parts = build_model(settings.part(ModelConfig), settings.part(EngineConfig), NUM_ROWS + len(kinds))
    slots = load_all(parts)
    cases = cases_of(slots, kinds)
    times = measure(parts, cases, options.steps)
    report = {"machine": machine(), "shape": options.shape, "steps": options.steps, "ms": {}, "kinds": {}}
    report["ms"] = {name: round(statistics.median(found) * 1000, 3) for name, found in times.items()}
    report["noise_ms"] = extra_ms(times, "16 plain again", "16 plain")
    for kind in kinds:
        ratios = [a / b for a, b in zip(times["16 plain"], times[f"15 plain + 1 {kind}"], strict=True)]
        report["kinds"][kind] = {
            "extra_ms_in_the_batch": extra_ms(times, f"15 plain + 1 {kind}", "16 plain"),
            "extra_ms_alone": extra_ms(times, f"1 {kind}", "1 plain"),
            "speed_of_plain_rows_kept": round(statistics.median(ratios), 3),
        }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def small_spec() -> ModelSpec:
    """Only to name the kinds before a model is there."""
    return ModelSpec("", "", 4, 4, (), 0, {}, 0, "float32", "cpu", input_embedding="e", output_head="h")


def adapters_of_each_kind(spec: ModelSpec) -> Mapping[str, SavedAdapter]:
    """kind -> an adapter of random weights: plain LoRA on every layer, and the kind's own besides."""
    hidden = spec.linears[spec.output_head].in_features if spec.linears else 1
    norms = {
        path: {"weight": torch.rand(hidden)} for path, table in spec.modules.items() if table == {"weight": (hidden,)}
    }
    dora = {
        path: SavedLinear(linear.a, linear.b, linear.scale, magnitude=torch.rand(linear.b.shape[1]))
        for path, linear in plain(spec).items()
        if linear.b is not None
    }
    rows = torch.randn(16, hidden)
    embedding = SavedEmbedding(torch.randn(spec.vocab_size, RANK), torch.randn(RANK, hidden), 0.01)
    head = {spec.output_head: {"weight": torch.randn(spec.vocab_size, hidden)}}
    parts = {
        "DoRA": {"linears": dora},
        "modules_to_save: norms": {"linears": plain(spec), "parameters": norms},
        "modules_to_save: lm_head": {"linears": plain(spec), "parameters": head},
        "LoRA of the embedding": {"linears": plain(spec), "embeddings": {spec.input_embedding: embedding}},
        "trained tokens": {
            "linears": plain(spec),
            "tokens": {spec.input_embedding: SavedTokens(tuple(range(16)), rows)},
        },
    }
    return {kind: SavedAdapter(kind, **fields) for kind, fields in parts.items()}  # type: ignore[arg-type]


def plain(spec: ModelSpec) -> dict[str, SavedLinear]:
    return {
        path: SavedLinear(torch.randn(RANK, shape.in_features), torch.randn(RANK, shape.out_features), 1e-3)
        for path, shape in spec.linears.items()
        if path != spec.output_head
    }


def load_all(parts: ModelParts) -> dict[str, SlotRef]:
    """Adapters into slots: "plain 0" .. "plain 15", then one of each kind."""
    table = {f"plain {index}": SavedAdapter(f"plain {index}", plain(parts.spec)) for index in range(NUM_ROWS)}
    table |= adapters_of_each_kind(parts.spec)
    slots = {}
    for index, (name, saved) in enumerate(table.items()):
        slots[name] = SlotRef(index, 1, saved.digest)
        parts.runner.load_slot(slots[name], parts.fold(saved))
    return slots


def cases_of(slots: Mapping[str, SlotRef], kinds: list[str]) -> dict[str, Batch]:
    plain_slots = [slots[f"plain {index}"] for index in range(NUM_ROWS)]
    cases = {
        "16 plain": batch_of(plain_slots),
        "16 plain again": batch_of(plain_slots),
        "1 plain": batch_of(plain_slots[:1]),
    }
    for kind in kinds:
        cases[f"15 plain + 1 {kind}"] = batch_of([slots[kind], *plain_slots[1:]])
        cases[f"1 {kind}"] = batch_of([slots[kind]])
    return cases


def batch_of(slots: list[SlotRef]) -> Batch:
    """One decode row per slot, each at CONTEXT tokens in blocks of its own."""
    width = -(-(CONTEXT + 1) // BLOCK_SIZE)
    greedy = SampleInput(SamplingParams(temperature=0.0), 0, 0, ())
    rows = tuple(
        Row(i, (5 + i,), CONTEXT, tuple(range(1 + i * width, 1 + (i + 1) * width)), (RowAdapter(slot),), greedy, None)
        for i, slot in enumerate(slots)
    )
    return Batch(rows, ())


def extra_ms(times: Mapping[str, list[float]], case: str, plain: str) -> float:
    """Median of the differences between two cases' neighbouring steps."""
    return round(statistics.median(a - b for a, b in zip(times[case], times[plain], strict=True)) * 1000, 3)


def measure(parts: ModelParts, cases: Mapping[str, Batch], steps: int) -> dict[str, list[float]]:
    """Seconds of every step of each case; the cases alternate."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for step in range(steps + 2):
        for name, batch in cases.items():
            start = time.perf_counter()
            parts.runner.run(batch)
            if step >= 2:
                times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
