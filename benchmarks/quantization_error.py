"""The error of bases that `lora-serve quantize` rounds, on the tasks of the demo's adapters.

    python -m benchmarks.quantization_error [--inputs 200]

Held-out inputs of each task, answered greedily by the real engine in this process, in mixed batches of all adapters:
the share whose whole answer is right. And by transformers and PEFT over the dequantised base, with the right answer
given: the mean of KL(float32 || this) of the answers' tokens, in nats, with activations in float32, where the weights
alone err, and in bfloat16. Writes benchmarks/results/quantization-error.json and the table of
docs/how-to/quantised-base.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.performance_tables import table
from benchmarks.report import RESULTS, machine, made_on, put_between
from lora_serve.cli import main as command
from tests.local_engine import LocalEngine
from tests.weight_packer import save_unpacked

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from demo_model import END, IGNORED, chat_row
from demo_tenants import TASKS, familiar_examples
from train_tools import ADAPTER as TOOLS
from train_tools import held_out_turns

DATA = Path("lora_serve/demo_data")
PAGE = Path("docs/how-to/quantised-base.md")
BEGIN, END_OF_TABLE = "<!-- error: begin -->", "<!-- error: end -->"
RESULT = RESULTS / "quantization-error.json"
PLAIN = "bfloat16"
WAYS: Mapping[str, Sequence[str]] = {
    "float32": (),
    PLAIN: (),
    "fp8": ("--to", "fp8"),
    "int8": ("--to", "int8"),
    "int4, groups of 32": ("--group-size", "32"),
    "int4, groups of 128": ("--group-size", "128"),
}


@dataclass(frozen=True)
class Asked:
    """A prompt and its only right answer."""

    prompt: list[int]
    answer: list[int]  # with the token that ends it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200, help="of each adapter, at most")
    options = parser.parse_args()
    asked = held_out(options.inputs)
    truth = {name: distributions(DATA / "model", torch.float32, name, asked[name]) for name in asked}
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: measured(name, Path(folder), asked, truth) for name in WAYS}
    report: dict[str, Any] = {"machine": machine(), "inputs": {name: len(asked[name]) for name in asked}}
    report |= {"command": f"python -m benchmarks.quantization_error --inputs {options.inputs}", "ways": ways}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    put_between(PAGE, BEGIN, END_OF_TABLE, page(report))
    print(page(report))


def held_out(most: int) -> dict[str, list[Asked]]:
    """What neither the base nor an adapter was trained on, by adapter."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "model")
    found = {}
    for task in TASKS:
        rows = [
            chat_row(tokenizer, (one.prompt, one.answer), False)
            for one in islice(familiar_examples(task, 0, held_out=True), most)
        ]
        starts = [next(i for i, label in enumerate(row.labels) if label != IGNORED) for row in rows]
        found[task.adapter] = [
            Asked(row.token_ids[:at], row.token_ids[at:]) for row, at in zip(rows, starts, strict=True)
        ]
    calls = [one for one in held_out_turns(tokenizer, 0) if one.kind == "call"][:most]
    texts = [
        (tokenizer.encode(text, add_special_tokens=False)) for one in calls for text in (one.prompt, one.answer + END)
    ]
    found[TOOLS] = [Asked(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
    return found


def measured(
    way: str, folder: Path, asked: Mapping[str, Sequence[Asked]], truth: Mapping[str, Sequence[Tensor]]
) -> dict[str, Any]:
    """Right answers and divergences, by adapter."""
    model = plain = DATA / "model"
    if WAYS[way]:
        model = folder / f"way-{list(WAYS).index(way)}"
        assert command(["quantize", str(DATA / "model"), str(model), *WAYS[way]]) == 0
        plain = save_unpacked(model, folder / f"{model.name}-unpacked")
    found: dict[str, Any] = {"right": right_answers(model, "float32" if way == "float32" else PLAIN, asked)}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found[f"kl_{name}"] = {
            adapter: divergence(truth[adapter], distributions(plain, dtype, adapter, rows))
            for adapter, rows in asked.items()
        }
    return found


def right_answers(model: Path, dtype: str, asked: Mapping[str, Sequence[Asked]]) -> dict[str, float]:
    """The share of answers that are right, by adapter."""
    folders = {name: DATA / "adapters" / name for name in asked}
    engine = LocalEngine(model, folders, dtype=dtype, max_num_seqs=32, max_loras=len(folders))
    pairs = [(name, one) for name, rows in asked.items() for one in rows]
    pairs = [pair for start in range(97) for pair in pairs[start::97]]  # all adapters in each batch
    limits = {name: max(len(one.answer) for one in rows) + 4 for name, rows in asked.items()}
    requests = [engine.request(one.prompt, name, max_tokens=limits[name]) for name, one in pairs]
    right = dict.fromkeys(asked, 0)
    for (name, one), answer in zip(pairs, engine.run(requests), strict=True):
        right[name] += answer.token_ids == one.answer
    return {name: right[name] / len(asked[name]) for name in asked}


@torch.inference_mode()
def distributions(model: Path, dtype: torch.dtype, adapter: str, asked: Sequence[Asked]) -> list[Tensor]:
    """log p [answer's tokens, vocabulary] of each answer's tokens."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    adapted = PeftModel.from_pretrained(base, str(DATA / "adapters" / adapter)).eval()
    return list(_of_each(adapted, asked))


def _of_each(model: PeftModel, asked: Sequence[Asked]) -> Iterator[Tensor]:
    for one in asked:
        logits = model(input_ids=torch.tensor([one.prompt + one.answer]), use_cache=False).logits[0]
        yield logits[len(one.prompt) - 1 : -1].float().log_softmax(-1)


def divergence(truth: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Mean KL(truth || found) of all tokens, in nats."""
    exact, other = (torch.cat(list(rows)).double() for rows in (truth, found))
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def page(report: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    ways, adapters = report["ways"], list(report["inputs"])
    lines = [[f"`{name}`", *(f"{100 * ways[way]['right'][name]:.1f}" for way in ways)] for name in adapters]
    mean = {way: sum(ways[way]["right"].values()) / len(adapters) for way in ways}
    lines.append(["mean of these", *(f"{100 * mean[way]:.1f}" for way in ways)])
    for dtype in ("float32", "bfloat16"):
        kls = {way: sum(ways[way][f"kl_{dtype}"].values()) / len(adapters) for way in ways}
        words = f"KL, activations in {dtype}"
        lines.append([words, *("0" if kls[way] < 1e-12 else f"{1000 * kls[way]:.2g}" for way in ways)])
    head = ["right answers in %; KL per token in thousandths of a nat", *ways]
    return f"{table(head, lines).strip()}\n\n{made_on(report['machine'])}"


if __name__ == "__main__":
    main()
