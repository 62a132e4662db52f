"""What --kv-cache-dtype changes: the demo's answers, and the time of a decode step over long contexts.

    python -m benchmarks.kv_cache_dtype --shape 135m --contexts 2048 --name 135m

Error: prompts of the demo with their adapters and answers, each as one row of the demo's model; the mean of KL(auto ||
type) over all positions, and in how many the answer's every token is the likeliest. Speed: steps of --rows decode rows
of each context on random weights; the formats' steps are timed in turn, in one process, each over a pool of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import lora_serve
from benchmarks.alternating import CLOCK_HELP, CLOCKS, Clock, median_ratio, time_alternating
from benchmarks.checkpoints import SHAPES, make_checkpoints
from benchmarks.report import RESULTS, machine
from benchmarks.step_model import StepModel, blocks_of, decode_batch
from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.weights import read_weights
from lora_serve.core.batch import Batch, Row, RowAdapter, SlotRef
from lora_serve.model.kv_format import FORMATS
from lora_serve.model.runner.model_runner import ModelRunner

_DEMO = Path(lora_serve.__file__).with_name("demo_data")
_SKIPPED = "summit/tools"  # it brings a chat template of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=10, help="of each adapter; 0: the error is not measured")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help=CLOCK_HELP)
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"), help="folder of checkpoints")
    parser.add_argument("--name", default="", help="of the file: kv-cache-dtype-NAME.json")
    options = parser.parse_args()
    folder, _ = make_checkpoints(options.cache, options.shape, 0, 0)
    report: dict[str, Any] = {
        "machine": machine(),
        "command": f"python -m benchmarks.kv_cache_dtype --shape {options.shape} --rows {options.rows} --contexts "
        f"{' '.join(map(str, options.contexts))} --dtype {options.dtype} --rounds {options.rounds} --prompts "
        f"{options.prompts} --clock {options.clock} --name {options.name}",
        "threads": torch.get_num_threads(),
        "error": errors(options.prompts) if options.prompts else None,
        "speed": {
            str(context): speed(folder, options.rows, context, options.dtype, options.rounds, CLOCKS[options.clock])
            for context in options.contexts
        },
    }
    text = json.dumps(report, indent=1)
    (RESULTS / f"kv-cache-dtype-{options.name}.json").write_text(text + "\n")
    print(text)


def speed(folder: Path, rows: int, context: int, dtype: str, rounds: int, clock: Clock) -> dict[str, Any]:
    """Milliseconds of a step by format, and how many times as fast as auto's it is."""
    num_blocks = rows * blocks_of(context) + 1
    models = {}
    for name in FORMATS:
        models[name] = StepModel(folder, 1, 2**28, dtype, kv_cache_dtype=name)
        _runner(models[name])._cache.resize(num_blocks)  # noqa: SLF001
        fill(_runner(models[name]))
    batch = decode_batch([None] * rows, context)
    cases = {name: lambda model=model: model.parts.runner.run(batch) for name, model in models.items()}  # type: ignore[misc]
    times = time_alternating(cases, rounds, clock)
    return {
        name: {
            "ms": 1000 * sorted(found)[len(found) // 2],
            "times_as_fast": median_ratio(times["auto"], found),
            "token_bytes": models[name].kv_token_bytes,
        }
        for name, found in times.items()
    }


def fill(runner: ModelRunner) -> None:
    """Random keys and values in all blocks: memory that was never written is read from one page of zeros."""
    cache = runner._cache  # noqa: SLF001
    positions = torch.arange(cache.block_size, cache.num_blocks * cache.block_size)
    for layer, heads in enumerate(cache.shape.layers):
        numbers = torch.randn(4096, *heads)
        for part in positions.split(len(numbers)):
            cache.write(layer, numbers[: len(part)], numbers[: len(part)], part)


def errors(count: int) -> dict[str, Any]:
    """By type of the model's numbers and format: the mean KL, and the share of answers that are right."""
    return {dtype: _errors_of(count, dtype) for dtype in ("float32", "bfloat16")}


def _errors_of(count: int, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain: list[Tensor] = []
    for name in FORMATS:
        kls, right = [], []
        for i, (logits, answer) in enumerate(answered(count, dtype, name)):
            logprobs = logits.log_softmax(-1)
            plain.extend([logprobs] if name == "auto" else [])
            kls.append((plain[i].exp() * (plain[i] - logprobs)).sum(-1))
            right.append(bool((logits[-len(answer) - 1 : -1].argmax(-1) == answer).all()))
        every = torch.cat(kls)
        found[name] = {
            "mean_kl": float(every.mean()),
            "largest_kl": float(every.max()),
            "right": sum(right) / len(right),
        }
    return {"num_prompts": len(plain), "num_positions": sum(map(len, plain)), **found}


def answered(count: int, dtype: str, stored: str) -> Iterator[tuple[Tensor, Tensor]]:
    """For each prompt the logits of all positions [tokens, vocabulary], and its answer's tokens, which end it."""
    prompts = json.loads((_DEMO / "prompts.json").read_text())
    names = sorted({item["adapter"] for item in prompts} - {_SKIPPED})
    model = StepModel(_DEMO / "model", len(names), 2**28, dtype, kv_cache_dtype=stored)
    tokenizer = AutoTokenizer.from_pretrained(_DEMO / "model")
    runner = _runner(model)
    seen: list[Tensor] = []
    compute = runner._model.logits  # noqa: SLF001
    runner._model.logits = lambda step: seen.append(compute(step)) or seen[-1]  # type: ignore[func-returns-value,method-assign] # noqa: SLF001
    for index, name in enumerate(names):
        folder = _DEMO / "adapters" / name
        host = model.parts.fold(read_weights(folder, read_artifact(folder, model.spec)))
        slot = SlotRef(index, 1, host.digest)
        runner.load_slot(slot, host)
        for item in [item for item in prompts if item["adapter"] == name][:count]:
            chat = [{"role": "user", "content": item["prompt"]}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            answer = tokenizer.encode(item["answer"], add_special_tokens=False)
            tokens = (*prompt, *answer)
            blocks = tuple(range(1, 1 + blocks_of(len(tokens))))
            row = Row(0, tokens, 0, blocks, (RowAdapter(slot),), None, (*tokens[1:], 0))
            seen.clear()
            runner.run(Batch((row,), blocks))
            yield torch.cat(seen).clone(), torch.tensor(answer)


def _runner(model: StepModel) -> ModelRunner:
    assert isinstance(model.parts.runner, ModelRunner)
    return model.parts.runner


if __name__ == "__main__":
    main()
