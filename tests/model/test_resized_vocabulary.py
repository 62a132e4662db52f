"""Adapters whose models were resized before their training, mixed in one batch with the base, against PEFT."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.kind_matrix import MAX_MODEL_LEN, NEW_TOKENS, TOLERANCE, Found, block_bytes, mismatches
from tests.local_engine import Answer, LocalEngine
from tests.oracle import load_fresh, logprobs_alone, peft_may_warn, save_tiny_model
from tests.peft_layers import Layers, read_layers

V = 97
BASE = "base"
ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "gemma2_soft_cap": ("gemma2", {}),
    "gpt2": ("gpt2", {}),
    "granite_logits_scaling": ("granite", {}),
}
LIMITS = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "max_model_len": MAX_MODEL_LEN, "block_size": 4}


@dataclass(frozen=True)
class Resized:
    """How to make an adapter of a resized model."""

    size: int
    config: Mapping[str, Any]
    save_embedding_layers: bool | str = "auto"


def kinds(layers: Layers, is_tied: bool) -> dict[str, Resized]:
    """By name; a head of its own and its embedding's, or only the rows of the new tokens."""
    both = [layers.embedding, layers.head]
    found = {
        "grown": Resized(V + 5, {"modules_to_save": both}),
        "grown_by_one": Resized(V + 1, {}, True),
        "shrunk": Resized(V - 3, {"modules_to_save": both}),
        "shrunk_embedding": Resized(V - 3, {"modules_to_save": [layers.embedding]}, False),
        "new_rows": Resized(V + 5, {"trainable_token_indices": [3, *range(V, V + 5)]}),
        "plain": Resized(V, {}),
    }
    if is_tied:
        found["new_rows_alone"] = Resized(V + 3, {"trainable_token_indices": list(range(V, V + 3))}, False)
    return found


def resized_model(model: Path, size: int) -> Any:
    """The base as a trainer resizes it; the new rows of base and oracle are random alike."""
    torch.manual_seed(7)
    base = load_fresh(model)
    if size != V:
        base.resize_token_embeddings(size, mean_resizing=False)
    return base


def save_resized(model: Path, folder: Path, kind: Resized, seed: int) -> Path:
    """A checkpoint by PEFT's own save_pretrained, every trainable tensor random."""
    base = resized_model(model, kind.size)
    config = {"r": 4, "lora_alpha": 8, "target_modules": [read_layers(base).attention], "task_type": "CAUSAL_LM"}
    with peft_may_warn():
        trained = peft.get_peft_model(base, peft.LoraConfig(**{**config, **kind.config}))
        generator = torch.Generator().manual_seed(seed)
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape, generator=generator) * 0.15
        trained.save_pretrained(folder, save_embedding_layers=kind.save_embedding_layers)
    return folder


def load_resized(model: Path, folder: Path, size: int) -> Any:
    """The oracle: PEFT alone on a base resized in the same way."""
    with peft_may_warn():
        return peft.PeftModel.from_pretrained(resized_model(model, size), folder).eval()


def prompts(size: int, seed: int) -> list[list[int]]:
    """Of several lengths; new tokens among them, where there are any."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(3, min(size, V), (length,), generator=generator).tolist() for length in (2, 13, 40, 60)]
    for prompt in found if size > V else ():
        prompt[-1] = size - 1
        prompt[len(prompt) // 2] = V
    return found


def wrong(oracle: Any, size: int, prompt: Sequence[int], answer: Answer) -> list[str]:
    """Where an answer, or the log-probabilities of its prompt, are not the oracle's."""
    assert answer.error is None, answer.error
    assert len(answer.token_ids) == NEW_TOKENS
    truth = logprobs_alone(oracle, prompt, answer.token_ids)
    assert truth.shape[1] == size
    logprobs = [item.logprob for item in answer.logprobs if item is not None]
    found = mismatches(Found(answer.token_ids, logprobs), truth[len(prompt) - 1 : -1])
    given = [item.logprob for item in answer.prompt_logprobs or () if item is not None]
    expected = truth[: len(prompt) - 1].gather(1, torch.tensor(prompt)[1:, None])[:, 0].tolist()
    assert len(given) == len(expected)
    return found + [f"{a:.4f}, not {b:.4f}" for a, b in zip(given, expected, strict=True) if abs(a - b) > TOLERANCE]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_of_every_vocabulary_share_a_batch_and_each_equals_peft_alone(name: str, tmp_path: Path) -> None:
    architecture, overrides = ARCHITECTURES[name]
    model = save_tiny_model(architecture, tmp_path / "model", **overrides)
    plain = load_fresh(model)
    table = kinds(read_layers(plain), plain.config.tie_word_embeddings)
    folders = {kind: save_resized(model, tmp_path / kind, how, i) for i, (kind, how) in enumerate(table.items())}
    engine = LocalEngine(model, folders, max_loras=4, kv_cache_memory=str(40 * block_bytes(plain)), **LIMITS)
    sizes = {BASE: V, **{kind: how.size for kind, how in table.items()}}
    rows = [(kind, prompt) for i, (kind, size) in enumerate(sizes.items()) for prompt in prompts(size, i)]
    random.Random(1).shuffle(rows)
    sampling = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 0}
    answers = engine.run([engine.request(prompt, None if kind == BASE else kind, **sampling) for kind, prompt in rows])
    assert engine.max_adapters_in_batch >= 3
    for kind, size in sizes.items():
        oracle = plain if kind == BASE else load_resized(model, folders[kind], size)
        mine = [(prompt, answer) for (row, prompt), answer in zip(rows, answers, strict=True) if row == kind]
        assert [line for prompt, answer in mine for line in wrong(oracle, size, prompt, answer)] == [], kind


def test_tables_that_peft_saved_whole_take_the_memory_of_their_new_rows_alone(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model", tie_word_embeddings=False)
    folder = save_resized(model, tmp_path / "adapter", Resized(V + 5, {}, True), 0)
    engine = LocalEngine(model, {"grown": folder}, max_loras=1, **LIMITS)
    low_rank = 2 * (4 * 32 + 32 * 4) * 4  # two layers of A and B in float32
    assert engine.refs["grown"].num_bytes <= low_rank + 2 * 5 * (32 * 4 + 8)


def test_an_answer_may_hold_new_tokens_and_the_base_beside_it_never_does(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model", tie_word_embeddings=False)
    folder = save_resized(
        model, tmp_path / "adapter", Resized(V + 5, {"modules_to_save": ["embed_tokens", "lm_head"]}), 0
    )
    engine = LocalEngine(model, {"grown": folder}, max_loras=1, **LIMITS)
    favoured = ((V + 2, 100.0),)
    warm = {"temperature": 5.0, "ignore_eos": True, "max_tokens": 40}
    own, base, sampled = engine.run(
        [
            engine.request([5, 6], "grown", logit_bias=favoured, ignore_eos=True),
            engine.request([5, 6], None, seed=3, **warm),
            engine.request([5, 6], "grown", seed=3, **warm),
        ]
    )
    assert own.token_ids == [V + 2] * 8
    assert max(base.token_ids) < V
    assert V <= max(sampled.token_ids) < V + 5


def test_an_id_beyond_the_adapters_vocabulary_ends_its_own_row_only(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model", tie_word_embeddings=False)
    folder = save_resized(
        model, tmp_path / "adapter", Resized(V - 3, {"modules_to_save": ["embed_tokens", "lm_head"]}), 0
    )
    engine = LocalEngine(model, {"shrunk": folder}, max_loras=1, **LIMITS)
    bad, good = engine.run([engine.request([5, V - 2], "shrunk"), engine.request([5, V - 2], None)])
    assert "below 94" in str(bad.error)
    assert good.error is None
