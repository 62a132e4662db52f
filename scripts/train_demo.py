#!/usr/bin/env python3
"""Make the demo: a small Llama-style base model and nine tenants' LoRA adapters, from text made here.

    python scripts/train_demo.py [--out DIR] [--seed N] [--processes N] [--only TENANT/NAME]

Writes DIR/model, DIR/adapters/<tenant>/<name>, DIR/prompts.json, DIR/tools.json, DIR/metadata.json and
DIR/evaluation.json (default: lora_serve/demo_data). About 30 minutes on two free cores; with --only one adapter is
made anew on the base that is there, and what the files say of the others stays. Training is one thread per process:
the same seed gives the same weights however busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from demo_checkpoint import SAFE_MARGIN, Measured, answers, load_base, margin, save_adapter
from demo_corpus import GENERAL, PRACTICE, Document, corpus
from demo_model import TrainingRow, batches, chat_row, fit, new_model, prompt_ids, text_row, train_tokenizer
from demo_tenants import ALL_LINEAR, TASKS, Task, examples, familiar_examples
from demo_tools import TOOLS
from peft import LoraConfig, PeftModel, get_peft_model
from train_tools import ADAPTER as TOOLS_ADAPTER
from train_tools import train_tools
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).resolve().parent.parent / "lora_serve" / "demo_data"
NUM_DOCUMENTS = 30_000  # of either part of the base model's training
BASE_STEPS = {"practice": 800, "general": 800}
BASE_RATE = 1.5e-3
NUM_ROWS = 4  # per step, of 256 tokens
NUM_TRAIN = 6000  # examples per task, at most
NUM_HELD_OUT = 200  # examples per task that are measured
NUM_PROMPTS = 25  # of them, shipped as package data
MAX_ANSWER = 32  # tokens
MIN_ADAPTER, MAX_BASE = 0.90, 0.20  # exact match
ADAPTERS = [*(task.adapter for task in TASKS), TOOLS_ADAPTER]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's base model and adapters.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write (default: lora_serve/demo_data)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="adapters trained at a time")
    parser.add_argument("--keep-base", action="store_true", help="train the adapters on the base that is in --out")
    parser.add_argument("--only", choices=ADAPTERS, help="train this adapter on the base that is in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keeps_base = arguments.keep_base or arguments.only
    base_seconds = None if keeps_base else train_base(arguments.out / "model", arguments.seed)
    names = [arguments.only] if arguments.only else ADAPTERS
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        measured = list(pool.map(partial(train_adapter, arguments.out, seed=arguments.seed), names))
    write_results(arguments.out, arguments.seed, base_seconds, measured)


def train_base(folder: Path, seed: int) -> float:
    """Write the tokenizer and the base model (bfloat16); returns the seconds it took."""
    started = time.monotonic()
    torch.manual_seed(seed)
    parts = {
        "practice": list(islice(corpus(seed, PRACTICE), NUM_DOCUMENTS)),
        "general": list(islice(corpus(seed + 1, GENERAL), NUM_DOCUMENTS)),
    }
    tokenizer = train_tokenizer(tokenizer_texts(parts["general"][:10_000], seed))
    model = new_model(tokenizer)
    print(f"base model: {model.num_parameters():,} weights", flush=True)
    for name, documents in parts.items():
        rows = [document_row(tokenizer, document) for document in documents]
        print(f"  {name}: {sum(len(row.token_ids) for row in rows):,} tokens of text", flush=True)
        parts = batches(rows, NUM_ROWS, Random(seed))
        fit(model, parts, num_steps=BASE_STEPS[name], rate=BASE_RATE)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return time.monotonic() - started


def tokenizer_texts(documents: Sequence[Document], seed: int) -> Iterator[str]:
    """General text, and answers of the tasks, so that their words are tokens: what to answer is not learned here."""
    for document in documents:
        yield document.text or " ".join(document.turns)
    for task in TASKS:
        yield from (example.answer for example in islice(examples(task, seed, held_out=False), 300))


def document_row(tokenizer: PreTrainedTokenizerFast, document: Document) -> TrainingRow:
    if document.text:
        return text_row(tokenizer, document.text)
    return chat_row(tokenizer, document.turns, document.learn_prompt)


def train_adapter(out: Path, name: str, seed: int) -> Measured:
    """Train, save, load again and measure one of ADAPTERS; runs in a process of its own."""
    torch.set_num_threads(1)
    shutil.rmtree(out / "adapters" / name, ignore_errors=True)
    index, started = ADAPTERS.index(name), time.monotonic()
    torch.manual_seed(seed + index)
    if name == TOOLS_ADAPTER:
        return train_tools(out, seed)
    task = TASKS[index]
    model, tokenizer = load_base(out)
    training = list(islice(familiar_examples(task, seed, held_out=False), NUM_TRAIN))
    rows = [chat_row(tokenizer, (example.prompt, example.answer), False) for example in training]
    config = LoraConfig(**{"target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM", "lora_dropout": 0.0, **task.lora})
    peft_model = get_peft_model(model, config)
    print(f"{task.adapter}: {len(rows)} examples", flush=True)
    fit(model, batches(rows, NUM_ROWS, Random(seed)), num_steps=task.num_steps, rate=task.learning_rate)
    seconds = time.monotonic() - started
    folder = out / "adapters" / task.adapter
    num_weights = save_adapter(peft_model, folder)
    return measure(out, task, seed, len(training), num_weights, seconds)


def measure(out: Path, task: Task, seed: int, num_training: int, num_weights: int, seconds: float) -> Measured:
    """The saved adapter and the base on inputs that neither has seen."""
    held_out = [*task.showcase, *islice(familiar_examples(task, seed, held_out=True), NUM_HELD_OUT)]
    held_out = list({example.prompt: example for example in held_out}.values())
    base, tokenizer = load_base(out)
    asked = [prompt_ids(tokenizer, [example.prompt]) for example in held_out]
    by_base = answers(base, tokenizer, asked, MAX_ANSWER + 4)
    adapted = PeftModel.from_pretrained(base, str(out / "adapters" / task.adapter)).eval()
    by_adapter = answers(adapted, tokenizer, asked, MAX_ANSWER + 4)
    for example, said, unadapted in list(zip(held_out, by_adapter, by_base, strict=True))[:2]:
        print(f"{task.adapter}: {example.prompt!r} -> {said!r} (base: {unadapted!r})", flush=True)
    wrong = [(example, said) for example, said in zip(held_out, by_adapter, strict=True) if said != example.answer]
    for example, said in wrong[:5]:
        print(f"{task.adapter}: wrong: {example.prompt!r} -> {said!r}, not {example.answer!r}", flush=True)
    good = [
        {"adapter": task.adapter, "task": task.title, "prompt": example.prompt, "answer": example.answer}
        for example, said, unadapted in zip(held_out, by_adapter, by_base, strict=True)
        if said == example.answer != unadapted
        and margin(adapted, chat_row(tokenizer, (example.prompt, example.answer), False)) >= SAFE_MARGIN
    ]
    config = adapted.peft_config["default"]
    return Measured(
        task.adapter,
        task.title,
        sum(said == e.answer for said, e in zip(by_adapter, held_out, strict=True)) / len(held_out),
        sum(said == e.answer for said, e in zip(by_base, held_out, strict=True)) / len(held_out),
        len(held_out),
        num_training,
        max([config.r, *config.rank_pattern.values()]),
        num_weights,
        round(seconds, 1),
        good[:NUM_PROMPTS],
    )


def write_results(out: Path, seed: int, base_seconds: float | None, measured: Sequence[Measured]) -> None:
    """The files beside the adapters, in which the others' lines stay; then refuse what does not meet the bars."""
    new = {result.adapter: result for result in measured}
    prompts = [item for item in _read(out / "prompts.json", []) if item["adapter"] not in new]
    prompts += [prompt for result in measured for prompt in result.prompts]
    _write(out / "prompts.json", sorted(prompts, key=lambda item: ADAPTERS.index(item["adapter"])))
    before = _read(out / "evaluation.json", {"adapters": []})
    results = [item for item in before["adapters"] if item["adapter"] not in new]
    results += [{k: v for k, v in asdict(result).items() if v != {} and k != "prompts"} for result in measured]
    evaluation = {
        "seed": seed,
        "base_training_seconds": before["base_training_seconds"] if base_seconds is None else round(base_seconds, 1),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "tokenizers")}
        | {"python": platform.python_version()},
        "adapters": sorted(results, key=lambda item: ADAPTERS.index(item["adapter"])),
    }
    _write(out / "evaluation.json", evaluation)
    _write(out / "tools.json", list(TOOLS.values()))
    _write(out / "metadata.json", {task.adapter: task.metadata for task in TASKS if task.metadata})
    for result in measured:
        print(f"{result.adapter:18} adapter {result.adapter_exact_match:.3f}  base {result.base_exact_match:.3f}")
    shown = {task.adapter: {example.prompt for example in task.showcase} for task in TASKS}
    for result in measured:
        assert result.adapter_exact_match >= MIN_ADAPTER, f"{result.adapter} is not good enough"
        assert result.base_exact_match <= MAX_BASE, f"{result.adapter} is not needed"
        assert len(result.prompts) == NUM_PROMPTS, f"{result.adapter} has too few sure answers"
        first = result.prompts[0]["prompt"]
        assert first in shown.get(result.adapter, {first}), f"{result.adapter} has no showcase"


def _read(path: Path, missing: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else missing


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
