"""The host's own time for a step of a GPU: scheduling, the events of every token, and the inputs of a captured graph.

    python -m benchmarks.host_step [--rows 64 256] [--context 500] [--out FILE.json]

The real engine launches each step ahead over a runner that computes nothing, on one thread; each row has an adapter of
16. Milliseconds of processor time, the median of STEPS steps that decode: "step" is `Engine.step`, "inputs" what
`StepBuffers.fill` adds before a graph is replayed. "core": percent of a core that 1 000 tokens/s take.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import machine
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, BlockMoves, RowAdapter, RowOutput, SlotRef
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import build_engine
from lora_serve.engine.loader import LoadFinished
from lora_serve.model.runner.step_buffers import GraphShape, StepBuffers

STEPS, BLOCK_SIZE, NUM_ADAPTERS, WIDTHS = 100, 16, 16, (64, 512, 4096)


@dataclass
class IdleDevice:
    """Implements `engine.Runner`, `Launcher` and `Flight`: each token is the same."""

    batch: Batch | None = None  # the last one

    def load_slot(self, slot: SlotRef, adapter: object) -> None: ...

    def clear_slot(self, index: int) -> None: ...

    def move_blocks(self, moves: BlockMoves) -> None: ...

    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        raise NotImplementedError

    def run(self, batch: Batch) -> list[RowOutput]:
        return [RowOutput(row.sequence_id, 7 if row.sample else None) for row in batch.rows]

    def launch(self, batch: Batch, before: object) -> Landing:
        self.batch = batch
        return Landing(self.run(batch))


@dataclass(frozen=True)
class Landing:
    outputs: list[RowOutput]

    def collect(self) -> list[RowOutput | None]:
        return list(self.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--context", type=int, default=500, help="tokens of each prompt")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/host-step.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # as the server does
    found = {str(rows): measure(rows, arguments.context) for rows in arguments.rows}
    report = {"machine": machine(), "context": arguments.context, "ms_by_rows": found}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(found))


def measure(num_rows: int, context: int) -> dict[str, float]:
    """Milliseconds of a step, and the percentage of a core."""
    length = context + 4 * STEPS
    settings = Settings(
        model="none", block_size=BLOCK_SIZE, max_num_seqs=num_rows, max_loras=NUM_ADAPTERS, speculate="off",
        max_num_batched_tokens=min(num_rows * context, 1 << 20),
    )  # fmt: skip
    device, asked = IdleDevice(), list[AdapterRef]()
    engine = build_engine(
        device, ModelSpec("none", "None", 2000, length, (1000,), 1, {}, 0, "bfloat16", "cpu"),
        num_rows * (length // BLOCK_SIZE + 1) + 1, settings.part(EngineConfig), settings.part(AdapterConfig),
        asked.append, launcher=device,
    )  # fmt: skip
    adapters = [AdapterUse(AdapterRef("tenant", f"a{i}", 1, f"sha256:{i:064x}", 8, 1)) for i in range(NUM_ADAPTERS)]
    for row in range(num_rows):
        prompt = tuple((1 + row * i) % 997 for i in range(context))
        sampling = SamplingParams(max_tokens=3 * STEPS, temperature=0.0)
        engine.scheduler.add(InferenceRequest(f"r{row}", prompt, sampling, (adapters[row % NUM_ADAPTERS],)))
    while device.batch is None or sum(row.is_fed for row in device.batch.rows) < num_rows:
        engine.step()
        while asked:
            digest = asked.pop().digest
            engine.load_finished(LoadFinished(digest, digest, None, 0.0))
    step = median_ms(engine.step)
    batch = device.batch
    width = next(width for width in WIDTHS if width * BLOCK_SIZE >= length)
    buffers = StepBuffers(GraphShape(num_rows, 0, width, with_lora=True), BLOCK_SIZE, [0], torch.device("cpu"))
    places = {row.sequence_id: place for place, row in enumerate(batch.rows)}
    inputs = median_ms(lambda: buffers.fill(batch.rows, places))
    core = (step + inputs) / num_rows * 100
    return {"step": round(step, 2), "inputs": round(inputs, 2), "core": round(core, 1)}


def median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(STEPS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
