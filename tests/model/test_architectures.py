"""Every architecture, mixed batches, against plain transformers and PEFT one adapter at a time (float32)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.local_engine import LocalEngine
from tests.oracle import (
    ARCHITECTURES,
    REPRESENTATIVE,
    load_peft,
    logprobs_with_peft,
    save_adapter,
    save_tiny_model,
)
from tests.tiers import mostly_nightly

ADAPTERS = {
    "rank2": {"r": 2, "lora_alpha": 4},
    "rank8": {"r": 8, "lora_alpha": 8, "use_rslora": True},
    "rank3": {"r": 3, "lora_alpha": 6, "layers_to_transform": [1]},
    "rank16": {"r": 16, "lora_alpha": 8},
}
PROMPT_LENGTHS = (3, 29, 11, 1, 18, 7, 40, 5, 23, 2)
NEW_TOKENS = 9
KV_MEMORY = {"gpt2": "80KiB", "deepseek_v3": "84KiB", "gemma4_text": "42KiB"}


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("architecture", mostly_nightly(ARCHITECTURES, *REPRESENTATIVE))
def test_mixed_batch_equals_each_adapter_alone_in_peft(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(architecture, tmp_path / "model")
    folders = {
        name: save_adapter(model, tmp_path / name, seed=seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    oracle = load_peft(model, folders)
    # 16 tokens per step: prompts run in chunks; 14 blocks of 4 tokens, or a few more, for ten sequences: preemption
    engine = LocalEngine(
        model, folders, max_num_batched_tokens=16, max_num_seqs=8, max_model_len=56, block_size=4, max_loras=4,
        kv_cache_memory=KV_MEMORY.get(architecture, "40KiB"),
        speculate="off",  # with guesses it depends on measured times which rows are preempted, or none
    )  # fmt: skip
    names = [None, *folders]
    rows = [(prompt, names[i % len(names)]) for i, prompt in enumerate(_prompts())]
    answers = engine.run([engine.request(p, a, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2) for p, a in rows])
    assert engine.max_adapters_in_batch >= 3
    # rows of a window give back blocks, and lack none: see test_windows.py
    assert engine.engine.stats().num_preemptions > 0 or None not in engine.parts.spec.windows
    for (prompt, adapter), answer in zip(rows, answers, strict=True):
        assert answer.error is None
        assert len(answer.token_ids) == NEW_TOKENS
        truth = logprobs_with_peft(oracle, adapter, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        assert answer.token_ids == truth.argmax(-1).tolist()
        found = torch.tensor([item.logprob for item in answer.logprobs if item is not None])
        assert torch.allclose(found, truth.max(-1).values, atol=1e-3)
