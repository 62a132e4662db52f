"""Several adapters in one row: PEFT's weighted sum of deltas, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kind_matrix import Found, mismatches
from tests.local_engine import LocalEngine
from tests.oracle import load_fresh, load_peft, save_adapter, save_tiny_model
from tests.tiers import mostly_nightly

ADAPTERS: Mapping[str, dict[str, Any]] = {
    "all": {"r": 4},
    "wide": {"r": 16, "use_rslora": True},
    "late": {"r": 2, "layers_to_transform": [1]},
    "head": {"r": 3, "target_modules": ["lm_head"]},
    "embedding": {"r": 3, "target_modules": ["embed_tokens"]},
}
SETS: tuple[Mapping[str, float], ...] = (
    {},
    {"all": 1.0},
    {"all": 0.5},
    {"wide": 1.0, "all": 1.0},
    {"all": 0.7, "wide": -0.4},
    {"late": 2.0, "head": 0.5, "embedding": 1.5},
    {"all": 0.25, "wide": 0.25, "late": 0.25, "head": 0.25, "embedding": 0.25},
    {"embedding": -1.0, "all": 0.0},
)
NEW_TOKENS = 6


def summed(model: Path, folders: Mapping[str, Path], scales: Mapping[str, float]) -> Any:
    """The base with the scaled sum of PEFT's own delta weights in its weights."""
    base = load_fresh(model)
    if not scales:
        return base
    found = load_peft(model, folders)
    with torch.no_grad():
        for path, layer in found.base_model.model.named_modules():
            for name, scale in scales.items():
                if name in getattr(layer, "lora_A", {}) or name in getattr(layer, "lora_embedding_A", {}):
                    base.get_submodule(path).weight += scale * layer.get_delta_weight(name)
    return base


@pytest.mark.parametrize(
    "architecture", mostly_nightly(["llama", "gemma3_text", "phi3", "qwen2"], "gemma3_text", "phi3")
)
def test_composed_rows_equal_the_weighted_sum_of_pefts_deltas(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(architecture, tmp_path / "model", tie_word_embeddings=False)
    folders = {
        name: save_adapter(model, tmp_path / name, seed=seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    engine = LocalEngine(
        model, folders, max_num_batched_tokens=24, max_num_seqs=6, max_model_len=72, block_size=4, max_loras=5,
        kv_cache_memory="150KiB",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (1, 41, 9)]
    rows = [(prompt, scales) for prompt in prompts for scales in SETS]
    answers = engine.run(
        [engine.request(p, s or None, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1) for p, s in rows]
    )
    for scales in SETS:
        oracle = summed(model, folders, scales)
        for (prompt, _), answer in [(r, a) for r, a in zip(rows, answers, strict=True) if r[1] is scales]:
            assert answer.error is None
            with torch.inference_mode():
                logits = oracle(input_ids=torch.tensor([prompt + answer.token_ids]), use_cache=False).logits
            truth = logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
            found = Found(answer.token_ids, [item.logprob for item in answer.logprobs if item is not None])
            assert mismatches(found, truth) == [], scales
    assert max(batch.num_adapters for batch in engine.engine.stats().recent_batches) >= 4


def test_order_of_a_set_does_not_matter(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    folders = {
        name: save_adapter(model, tmp_path / name, seed=i, **ADAPTERS[name]) for i, name in enumerate(("all", "wide"))
    }
    engine = LocalEngine(model, folders, block_size=4, kv_cache_memory="100KiB")
    first, second = engine.run(
        [
            engine.request([5, 6, 7], scales, logprobs=1)
            for scales in ({"all": 0.5, "wide": 2.0}, {"wide": 2.0, "all": 0.5})
        ]
    )
    assert first.token_ids == second.token_ids
    assert [item.logprob for item in first.logprobs if item] == pytest.approx(
        [item.logprob for item in second.logprobs if item], abs=1e-5
    )
