"""Slots that shrink and grow again on a real model: every answer stays PEFT's."""

from __future__ import annotations

from pathlib import Path

import torch

from lora_serve.core.messages import Command, Reply, Resize
from tests.kind_matrix import Found, mismatches
from tests.local_engine import LocalEngine
from tests.oracle import load_alone, logprobs_alone, save_tiny_model
from tests.peft_kinds import save_kind


def test_answers_are_pefts_before_and_after_the_slots_shrank_and_grew(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    folders = {name: save_kind("plain", "llama", model, tmp_path / name, seed=i) for i, name in enumerate("abc")}
    oracles = {name: load_alone(model, folder) for name, folder in folders.items()}
    engine = LocalEngine(model, folders, max_loras=3, max_num_seqs=4, kv_cache_memory="400KiB", max_model_len=96)
    prompt = torch.randint(20, 90, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    for max_loras in (3, 1, 2, 3):
        engine.engine.command(command := Command(1, Resize(max_loras=max_loras)))
        assert engine.engine.commands.take_replies() == [(command, Reply(1))]
        requests = [engine.request(prompt, name, max_tokens=6, ignore_eos=True, logprobs=1) for name in "abc"]
        for name, answer in zip("abc", engine.run(requests), strict=True):
            assert answer.error is None
            truth = logprobs_alone(oracles[name], prompt, answer.token_ids)[len(prompt) - 1 : -1]
            logprobs = [item.logprob for item in answer.logprobs if item is not None]
            assert mismatches(Found(answer.token_ids, logprobs), truth) == []
        recent = engine.engine.stats().recent_batches[-6:]
        assert max(batch.num_adapters for batch in recent) <= max_loras
        assert len(list(engine.engine.residency.slots.infos())) == max_loras
