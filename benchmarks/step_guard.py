"""Fails when a decode step costs more, in ratios, than what is committed in benchmarks/step_guard.json.

    python -m benchmarks.step_guard [--update] [--rounds 60]

Three ratios of 16 decode rows on a Llama shape of six layers, made in memory: 16 adapters / base, one adapter for all
/ base, and the base's step / its own products (benchmarks/step_floor.py). Never absolute times: each ratio is of cases
that alternate, on one thread, by the processor time of this process, which does not count the time that others run;
the median of the rounds counts. If one is above its reference by more than its margin all are measured again, at most
twice, and only what was above each time fails. What gets better is asked to be noted with `--update`.

References are kept by kind of machine: instruction set, type, LoRA kernel. For another kind the ratios are only shown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.alternating import median_ratio, time_alternating
from benchmarks.step_floor import gemms_of
from benchmarks.step_model import RANKS, StepModel, blocks_of, decode_batch
from lora_serve.core.batch import Batch
from lora_serve.model.lora.kernels import create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots

REFERENCE = Path(__file__).with_name("step_guard.json")
NUM_ROWS, NUM_KEYS, MAX_TRIES = 16, 128, 3
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """What is committed."""

    margins: Mapping[str, float]  # ratio's name -> by which part it may be above its reference
    kinds: Mapping[str, Mapping[str, float]]  # kind of machine -> ratio's name -> ratio

    @staticmethod
    def read(file: Path) -> Reference:
        document = json.loads(file.read_text())
        return Reference(document["margins"], document["kinds"])

    def write(self, file: Path) -> None:
        file.write_text(json.dumps({"margins": self.margins, "kinds": self.kinds}, indent=1) + "\n")


class GuardedModel:
    """The model and its four cases."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
        model = StepModel(folder, NUM_ROWS, 2**26)
        adapters = model.load([RANKS[i % len(RANKS)] for i in range(NUM_ROWS)])
        model.touch(NUM_ROWS * blocks_of(NUM_KEYS))
        base = decode_batch([None] * NUM_ROWS, NUM_KEYS)
        self._runner = model.parts.runner
        self.dtype = model.spec.dtype
        self._gemms = gemms_of(model, base)
        self._batches: dict[str, Batch] = {
            "base": base,
            "identical": decode_batch(adapters[:1] * NUM_ROWS, NUM_KEYS),
            "distinct": decode_batch(adapters, NUM_KEYS),
        }

    def times(self, rounds: int) -> dict[str, list[float]]:
        """Processor seconds of base, identical, distinct and gemms, one per round."""
        run = self._runner.run
        cases = {name: lambda batch=batch: run(batch) for name, batch in self._batches.items()}
        return time_alternating({**cases, "gemms": self._gemms}, rounds, time.process_time)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="note the ratios as this kind of machine's reference")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    reference = Reference.read(options.reference)
    with tempfile.TemporaryDirectory() as scratch:
        model = GuardedModel(Path(scratch))
        kind = kind_of_machine(model.dtype)
        expected = reference.kinds.get(kind)
        tries = [ratios(model.times(options.rounds))]
        while expected and len(tries) < MAX_TRIES and worse(best(tries), expected, reference.margins):
            tries.append(ratios(model.times(options.rounds)))
    found = best(tries)
    print(f"step guard on {kind}, {len(tries)} x {options.rounds} rounds")
    if options.update:
        Reference(reference.margins, {**reference.kinds, kind: found}).write(options.reference)
        print(f"noted: {found}")
        return 0
    return judge(found, expected, reference.margins)


def kind_of_machine(dtype: str) -> str:
    """E.g. "avx2 float32 native": what the ratios depend on, besides the code."""
    capability = {"AVX2": "avx2", "AVX512": "avx512"}.get(torch.backends.cpu.get_cpu_capability(), "other")
    kernel = create_kernel("auto", LoraSlots({}, 1, torch.device("cpu")))
    return f"{capability} {dtype} {type(kernel).__module__.rpartition('.')[2]}"


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The three ratios of one series of rounds."""
    return {
        "distinct / base": round(median_ratio(times["distinct"], times["base"]), 3),
        "identical / base": round(median_ratio(times["identical"], times["base"]), 3),
        "step / its products": round(median_ratio(times["base"], times["gemms"]), 3),
    }


def best(tries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The least that each ratio was: noise only adds."""
    return {name: min(one[name] for one in tries) for name in tries[0]}


def worse(found: Mapping[str, float], expected: Mapping[str, float], margins: Mapping[str, float]) -> list[str]:
    """Names of the ratios that are too high."""
    return [name for name, ratio in found.items() if ratio > expected[name] * (1 + margins[name])]


def judge(found: Mapping[str, float], expected: Mapping[str, float] | None, margins: Mapping[str, float]) -> int:
    """Say how the ratios stand; the exit status."""
    if expected is None:
        print(f"{dict(found)}\nno reference for this kind of machine: nothing is guarded here.")
        print("scripts/step_guard --update, on an idle machine, notes these ratios as the reference to commit.")
        return 0
    for name, ratio in found.items():
        change = ratio / expected[name] - 1
        print(f"{name:20} {ratio:6.3f}   reference {expected[name]:6.3f}   {change:+.1%} of {margins[name]:+.0%}")
    if failed := worse(found, expected, margins):
        print(f"FAILED, above the reference by more than the margin: {', '.join(failed)}.")
        print("If that is meant, scripts/step_guard --update notes it, and the commit says why.")
        return 1
    if worse(expected, found, margins):
        print("Better by more than the margin: scripts/step_guard --update would hold it.")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
