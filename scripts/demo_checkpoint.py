"""The demo's base and adapters as saved files, and what they say when loaded again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_model import IGNORED, TrainingRow
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

BASE_NAME = "lora-serve-demo"
SAFE_MARGIN = 1.0  # of a shipped answer's every token over the next best, in logits: holds in any dtype


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
    prompts: list[dict[str, Any]]
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)  # of input: exact match and number of inputs


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


@torch.inference_mode()
def answers(
    model: LlamaForCausalLM | PeftModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> list[str]:
    """What `model` says to each prompt, greedily."""
    said: list[str] = []
    for start in range(0, len(prompts), 50):
        batch = tokenizer.pad(
            {"input_ids": list(prompts[start : start + 50])}, padding_side="left", return_tensors="pt"
        )
        output = model.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
        said += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


@torch.inference_mode()
def margin(model: PeftModel, row: TrainingRow) -> float:
    """How far the least certain token of the right answer is above the next best, in logits."""
    labels = torch.tensor(row.labels[1:])
    logits = model(input_ids=torch.tensor([row.token_ids])).logits[0, :-1][labels != IGNORED]
    right = labels[labels != IGNORED][:, None]
    others = logits.scatter(1, right, -torch.inf).max(dim=1).values
    return float((logits.gather(1, right)[:, 0] - others).min())
