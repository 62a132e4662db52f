"""What the canaries ask, and what transformers and PEFT alone answer: 4 tenants x {base, adapter A, adapter B}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedTokenizerFast

from tests.oracle import load_peft, logprobs_with_peft, save_adapter, save_tiny_model
from tests.text.tiny_tokenizer import byte_level_tokenizer

TENANTS = ("acme", "globex", "hooli", "initech")
LETTERS = ("a", "b")
BASE = "tiny"
NEW_TOKENS = 6
MARKER = "zqx-private"  # begins every prompt; must never be in a log


@dataclass(frozen=True)
class Question:
    """A greedy question with the tokens of the right answer, and their log-probabilities by every model there is."""

    tenant: str
    model: str
    prompt: str
    tokens: tuple[int, ...]
    logprobs: Mapping[str, torch.Tensor]  # by model: [NEW_TOKENS], teacher-forced

    def distance(self, model: str, found: torch.Tensor) -> float:
        """Mean |difference| of log-probabilities to those of `model`."""
        return (self.logprobs[model] - found).abs().mean().item()


@dataclass(frozen=True)
class World:
    """Files for a server, and the questions."""

    root: Path
    model: Path
    adapters: Mapping[str, Path]  # by id
    questions: Sequence[Question]
    engine: Mapping[str, Any] = field(default_factory=dict)  # settings: where servers have their engines

    def modules(self) -> tuple[str, ...]:
        """--lora-modules"""
        return tuple(f"{name}={folder}" for name, folder in self.adapters.items())


def make_world(root: Path) -> World:
    tokenizer = byte_level_tokenizer()
    model = save_tiny_model("llama", root / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    names = [f"{tenant}/{letter}" for tenant in TENANTS for letter in LETTERS]
    adapters = {
        name: save_adapter(model, root / "adapters" / name, seed=seed, std=0.2, r=2 << seed % 3)
        for seed, name in enumerate(names)
    }
    return World(root, model, adapters, _questions(model, adapters, tokenizer))


def _questions(model: Path, adapters: Mapping[str, Path], tokenizer: PreTrainedTokenizerFast) -> list[Question]:
    oracle = load_peft(model, {name.replace("/", "_"): folder for name, folder in adapters.items()})
    assert isinstance(oracle, peft.PeftModel)
    choices = {BASE: None, **{name: name.replace("/", "_") for name in adapters}}
    questions = []
    for tenant in TENANTS:
        for name in (BASE, *(f"{tenant}/{letter}" for letter in LETTERS)):
            prompt = f"{MARKER} {tenant} wonders about {name[::-1]}"
            ids = list(tokenizer(prompt)["input_ids"])
            answer = _greedy(oracle, choices[name], ids)
            known = {other: _forced(oracle, choice, ids, answer) for other, choice in choices.items()}
            questions.append(Question(tenant, name, prompt, tuple(answer), known))
    return questions


def _greedy(oracle: Any, adapter: str | None, ids: list[int]) -> list[int]:
    answer: list[int] = []
    for _ in range(NEW_TOKENS):
        answer.append(int(logprobs_with_peft(oracle, adapter, ids + answer)[-1].argmax()))
    return answer


def _forced(oracle: Any, adapter: str | None, ids: list[int], answer: list[int]) -> torch.Tensor:
    found = logprobs_with_peft(oracle, adapter, ids + answer)[len(ids) - 1 : -1]
    return found.gather(1, torch.tensor(answer)[:, None])[:, 0]
