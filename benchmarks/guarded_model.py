"""The model that `benchmarks.step_guard` measures, and a process that measures it for another one.

    python -P benchmarks/guarded_model.py DTYPE     tells whose code it runs; each line on standard input
                                                    runs all cases once and is answered by a line of JSON

The process imports `lora_serve` and `benchmarks.step_model` of whatever checkout PYTHONPATH names, so that this file
measures the code of another commit as well as this one's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lora_serve
from benchmarks.step_model import RANKS, StepModel, blocks_of, decode_batch

NUM_ROWS, NUM_KEYS = 16, 128
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}


class GuardedModel:
    """A Llama shape of six layers with random weights, and decode steps of 16 rows on it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """`folder`: an empty one, for the checkpoint."""
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
        self.model = StepModel(folder, NUM_ROWS, 2**26, dtype)
        adapters = self.model.load([RANKS[i % len(RANKS)] for i in range(NUM_ROWS)])
        self.model.touch(NUM_ROWS * blocks_of(NUM_KEYS))
        self.batches = {
            "base": decode_batch([None] * NUM_ROWS, NUM_KEYS),
            "identical": decode_batch(adapters[:1] * NUM_ROWS, NUM_KEYS),
            "distinct": decode_batch(adapters, NUM_KEYS),
        }

    def cases(self) -> dict[str, Callable[[], object]]:
        """Steps by name: base, identical (one adapter for all), distinct (one for each row)."""
        run = self.model.parts.runner.run
        return {name: lambda batch=batch: run(batch) for name, batch in self.batches.items()}  # type: ignore[misc]


def answer(dtype: str) -> None:
    """Answer every line of standard input with the processor seconds of each case."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        cases = GuardedModel(Path(scratch), dtype).cases()
    for case in cases.values():
        case()
    print(Path(lora_serve.__file__).parents[1], flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: _seconds(case) for name, case in cases.items()}), flush=True)


def _seconds(case: Callable[[], object]) -> float:
    start = time.process_time()
    case()
    return time.process_time() - start


if __name__ == "__main__":
    answer(sys.argv[1])
