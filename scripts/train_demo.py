#!/usr/bin/env python3
"""Make the demo: a small Llama-style base model and eight tenants' LoRA adapters, from text made here.

    python scripts/train_demo.py [--out DIR] [--seed N] [--processes N]

Writes DIR/model, DIR/adapters/<tenant>/<name>, DIR/prompts.json and DIR/evaluation.json (default:
lora_serve/demo_data). About 20 minutes on two free cores. Training is one thread per process: the same seed gives
the same weights however busy the machine is.
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
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import torch
from demo_corpus import GENERAL, PRACTICE, Document, corpus
from demo_model import IGNORED, TrainingRow, chat_row, fit, new_model, prompt_ids, text_row, train_tokenizer
from demo_tasks import Example
from demo_tenants import ALL_LINEAR, TASKS, Task, examples, familiar_examples
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = Path(__file__).resolve().parent.parent / "lora_serve" / "demo_data"
BASE_NAME = "lora-serve-demo"
NUM_DOCUMENTS = 30_000  # of either part of the base model's training
BASE_STEPS = {"practice": 800, "general": 800}
BASE_RATE = 1.5e-3
NUM_ROWS = 4  # per step, of 256 tokens
NUM_TRAIN = 6000  # examples per task, at most
NUM_HELD_OUT = 200  # examples per task that are measured
NUM_PROMPTS = 25  # of them, shipped as package data
MAX_ANSWER = 32  # tokens
SAFE_MARGIN = 1.0  # of a shipped answer's every token over the next best, in logits: holds in any dtype
MIN_ADAPTER, MAX_BASE = 0.90, 0.20  # exact match


@dataclass(frozen=True)
class Measured:
    """One adapter on its held-out inputs; shares are exact match of the whole answer, greedy."""

    adapter: str
    task: str
    adapter_exact_match: float
    base_exact_match: float
    num_inputs: int
    num_training_examples: int
    rank: int  # the largest of any module
    num_weights: int
    training_seconds: float
    prompts: list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's base model and adapters.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write (default: lora_serve/demo_data)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="adapters trained at a time")
    parser.add_argument("--keep-base", action="store_true", help="train the adapters on the base that is in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base_seconds = 0.0 if arguments.keep_base else train_base(arguments.out / "model", arguments.seed)
    shutil.rmtree(arguments.out / "adapters", ignore_errors=True)
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(train_adapter, arguments.out, index, arguments.seed) for index in range(len(TASKS))]
        measured = [future.result() for future in futures]
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
        fit(model, rows, num_steps=BASE_STEPS[name], num_rows=NUM_ROWS, rate=BASE_RATE, seed=seed)
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


def train_adapter(out: Path, index: int, seed: int) -> Measured:
    """Train, save, load again and measure the adapter of TASKS[index]; runs in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(seed + index)
    task, started = TASKS[index], time.monotonic()
    model, tokenizer = load_base(out)
    training = list(islice(familiar_examples(task, seed, held_out=False), NUM_TRAIN))
    rows = [chat_row(tokenizer, (example.prompt, example.answer), False) for example in training]
    config = LoraConfig(**{"target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM", "lora_dropout": 0.0, **task.lora})
    peft_model = get_peft_model(model, config)
    print(f"{task.adapter}: {len(rows)} examples", flush=True)
    fit(model, rows, num_steps=task.num_steps, num_rows=NUM_ROWS, rate=task.learning_rate, seed=seed)
    seconds = time.monotonic() - started
    folder = out / "adapters" / task.adapter
    num_weights = save_adapter(peft_model, folder)
    return measure(out, task, seed, len(training), num_weights, seconds)


def load_base(out: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The saved base in float32: what the adapters are trained on is what is shipped."""
    model = LlamaForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(out / "model")


def save_adapter(peft_model: PeftModel, folder: Path) -> int:
    """Write the PEFT checkpoint (bfloat16), the same bytes for the same weights; returns the number of weights."""
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in get_peft_model_state_dict(peft_model).items()}
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    config = peft_model.peft_config["default"]
    config.inference_mode = True
    config.save_pretrained(folder)
    path = folder / "adapter_config.json"
    written = json.loads(path.read_text())
    written |= {"base_model_name_or_path": BASE_NAME, "target_modules": sorted(written["target_modules"])}
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    return sum(weight.numel() for weight in weights.values())


def measure(out: Path, task: Task, seed: int, num_training: int, num_weights: int, seconds: float) -> Measured:
    """The saved adapter and the base on inputs that neither has seen."""
    held_out = [*task.showcase, *islice(familiar_examples(task, seed, held_out=True), NUM_HELD_OUT)]
    held_out = list({example.prompt: example for example in held_out}.values())
    base, tokenizer = load_base(out)
    by_base = answers(base, tokenizer, held_out)
    adapted = PeftModel.from_pretrained(base, str(out / "adapters" / task.adapter)).eval()
    by_adapter = answers(adapted, tokenizer, held_out)
    for example, said, unadapted in list(zip(held_out, by_adapter, by_base, strict=True))[:2]:
        print(f"{task.adapter}: {example.prompt!r} -> {said!r} (base: {unadapted!r})", flush=True)
    wrong = [(example, said) for example, said in zip(held_out, by_adapter, strict=True) if said != example.answer]
    for example, said in wrong[:5]:
        print(f"{task.adapter}: wrong: {example.prompt!r} -> {said!r}, not {example.answer!r}", flush=True)
    good = [
        {"adapter": task.adapter, "task": task.title, "prompt": example.prompt, "answer": example.answer}
        for example, said, unadapted in zip(held_out, by_adapter, by_base, strict=True)
        if said == example.answer != unadapted and margin(adapted, tokenizer, example) >= SAFE_MARGIN
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


@torch.inference_mode()
def answers(
    model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerFast, asked: Sequence[Example]
) -> list[str]:
    """What `model` says to each prompt, greedily, through the chat template."""
    said: list[str] = []
    for start in range(0, len(asked), 50):
        prompts = [prompt_ids(tokenizer, [example.prompt]) for example in asked[start : start + 50]]
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        output = model.generate(**batch, do_sample=False, max_new_tokens=MAX_ANSWER + 4)
        said += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


@torch.inference_mode()
def margin(model: PeftModel, tokenizer: PreTrainedTokenizerFast, example: Example) -> float:
    """How far the least certain token of the right answer is above the next best, in logits."""
    row: TrainingRow = chat_row(tokenizer, (example.prompt, example.answer), False)
    labels = torch.tensor(row.labels[1:])
    logits = model(input_ids=torch.tensor([row.token_ids])).logits[0, :-1][labels != IGNORED]
    right = labels[labels != IGNORED][:, None]
    others = logits.scatter(1, right, -torch.inf).max(dim=1).values
    return float((logits.gather(1, right)[:, 0] - others).min())


def write_results(out: Path, seed: int, base_seconds: float, measured: Sequence[Measured]) -> None:
    """prompts.json and evaluation.json; then refuse what does not meet the bars."""
    prompts = [prompt for result in measured for prompt in result.prompts]
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    evaluation = {
        "seed": seed,
        "base_training_seconds": round(base_seconds, 1),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "tokenizers")}
        | {"python": platform.python_version()},
        "adapters": [{k: v for k, v in asdict(result).items() if k != "prompts"} for result in measured],
    }
    (out / "evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n")
    for result in measured:
        print(f"{result.adapter:18} adapter {result.adapter_exact_match:.3f}  base {result.base_exact_match:.3f}")
    for task, result in zip(TASKS, measured, strict=True):
        assert result.adapter_exact_match >= MIN_ADAPTER, f"{result.adapter} is not good enough"
        assert result.base_exact_match <= MAX_BASE, f"{result.adapter} is not needed"
        assert len(result.prompts) == NUM_PROMPTS, f"{result.adapter} has too few sure answers"
        assert result.prompts[0]["prompt"] in {e.prompt for e in task.showcase}, f"{result.adapter} has no showcase"


if __name__ == "__main__":
    main()
