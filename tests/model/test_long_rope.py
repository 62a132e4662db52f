"""Rows on both sides of LongRoPE's boundary in one batch: each answers as transformers' `generate` does alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import ONE_ROPE
from lora_serve.model.loading.positions import find_positions, position_calls
from tests.local_engine import Answer, LocalEngine
from tests.oracle import load_alone, load_fresh, logprobs_alone, save_adapter, save_tiny_model

BOUNDARY = 256
FACTORS = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 6.0, 8.0]}
OF_PHI3 = {"original_max_position_embeddings": BOUNDARY, "rope_parameters": FACTORS}  # `generate` computes it anew
OF_LLAMA = {"rope_parameters": {**FACTORS, "original_max_position_embeddings": BOUNDARY}}  # `generate` keeps K and V
LIMITS: dict[str, Any] = {
    "block_size": 16,
    "max_loras": 2,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "kv_cache_memory": "4MiB",
    "speculate": "3",
}


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(5, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class World:
    def __init__(self, architecture: str, folder: Path, **settings: Any) -> None:
        factors = OF_PHI3 if architecture == "phi3" else OF_LLAMA
        self.model = save_tiny_model(architecture, folder / "m", max_position_embeddings=1024, **factors)
        self.adapter = save_adapter(self.model, folder / "a")
        self.engine = LocalEngine(self.model, {"a": self.adapter}, **{**LIMITS, **settings})
        self.oracles = {None: load_fresh(self.model), "a": load_alone(self.model, self.adapter)}

    def ask(self, *asked: tuple[list[int], str | None, int], **fields: Any) -> list[Answer]:
        """Answers to (prompt, adapter, number of tokens), all at once; each is held against `generate`."""
        sampling = {"ignore_eos": True, "logprobs": 1, **fields}
        answers = self.engine.run([self.engine.request(p, a, max_tokens=n, **sampling) for p, a, n in asked])
        for (prompt, adapter, count), answer in zip(asked, answers, strict=True):
            assert answer.error is None
            truth, logprobs = self.generated(prompt, adapter, count)
            assert answer.token_ids == truth
            found = torch.tensor([item.logprob for item in answer.logprobs if item is not None])
            assert (found - logprobs).abs().max() < 2e-3
        return answers

    @torch.inference_mode()
    def generated(self, prompt: list[int], adapter: str | None, count: int) -> tuple[list[int], torch.Tensor]:
        found = self.oracles[adapter].generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count, do_sample=False, return_dict_in_generate=True, output_logits=True, eos_token_id=None,
        )  # fmt: skip
        own = found.sequences[0, len(prompt) :]
        logprobs = torch.cat(found.logits).float().log_softmax(-1)
        return own.tolist(), logprobs.gather(1, own[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_rows_on_both_sides_of_the_boundary_answer_as_alone(architecture: str, tmp_path: Path) -> None:
    world = World(architecture, tmp_path)
    below, grows, long = tokens(BOUNDARY - 30, 8), tokens(BOUNDARY - 6, 1), tokens(600, 2)
    world.ask((below, None, 9), (long, None, 8), (grows, None, 14), (grows, "a", 14), (tokens(300, 3), "a", 8))
    asked = (below + tokens(40, 4), None, 6), (long[:-9], None, 6), (below, None, 6), (grows, "a", 9)
    longer, again, short, _ = world.ask(*asked)
    assert longer.num_cached_tokens == 0  # all that is known of its beginning was computed by the short factors
    assert again.num_cached_tokens > BOUNDARY
    assert short.num_cached_tokens > 200


@pytest.mark.parametrize("length", [BOUNDARY - 1, BOUNDARY, BOUNDARY + 1])
@pytest.mark.parametrize("architecture", ["phi3", pytest.param("llama", marks=pytest.mark.nightly)])
def test_each_length_around_the_boundary(architecture: str, length: int, tmp_path: Path) -> None:
    world = World(architecture, tmp_path, speculate="off")
    prompt = tokens(length, 5)
    (answer,) = world.ask((prompt, None, 4), prompt_logprobs=1)
    truth = logprobs_alone(world.oracles[None], prompt)
    found = torch.tensor([item.logprob for item in answer.prompt_logprobs or () if item is not None])
    assert (found - truth[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]).abs().max() < 2e-3


@pytest.mark.nightly
@pytest.mark.parametrize("swap_space", ["0", "1MiB"])
@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_rows_that_are_preempted_around_the_boundary(architecture: str, swap_space: str, tmp_path: Path) -> None:
    """Room for two rows: of six that cross, some are preempted before that, some while they are computed anew."""
    world = World(architecture, tmp_path, kv_cache_memory="136KiB", max_model_len=440, swap_space=swap_space)
    rows = [(tokens(BOUNDARY - 3 - 5 * i, i), "a" if i % 2 else None, 40) for i in range(6)]
    world.ask(*rows, (tokens(400, 9), None, 12))
    assert world.engine.engine.stats().num_preemptions > 0


def test_a_model_served_below_the_boundary_has_none(tmp_path: Path) -> None:
    world = World("phi3", tmp_path, max_model_len=BOUNDARY)
    assert world.engine.parts.spec.long_rope == ONE_ROPE
    world.ask((tokens(BOUNDARY - 8), None, 8), (tokens(9), "a", 8))


def test_dynamic_ntk_is_plain_within_the_positions_that_the_model_knows(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    folder = save_tiny_model("llama", tmp_path / "m", max_position_embeddings=64, rope_parameters=rope)
    engine = LocalEngine(folder, **LIMITS)
    prompts = [tokens(60), tokens(9, 1)]
    answers = engine.run([engine.request(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = logprobs_alone(load_fresh(folder), prompt, answer.token_ids)
        assert truth.argmax(-1)[len(prompt) - 1 : -1].tolist() == answer.token_ids
    with pytest.raises(ModelError, match=r"--max-model-len 65.* 64 positions"):
        LocalEngine(folder, **LIMITS, max_model_len=65)


class Growing(nn.Module):
    """A rotation whose frequencies change with every token beyond the 40th of the longest row."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.sin(position_ids[..., None] / (position_ids.max() + 1).clamp(min=40))


def test_positions_that_change_with_every_token_are_refused_with_the_length_that_can_be_served() -> None:
    module = Growing()
    with position_calls(module) as calls:
        module(torch.zeros(1, 3, 2), position_ids=torch.arange(3)[None])
    with pytest.raises(ModelError, match=r"Growing .* --max-model-len 40$"):
        find_positions(module, calls, 100)  # type: ignore[arg-type]
    assert find_positions(module, calls, 40) == (ONE_ROPE, ())  # type: ignore[arg-type]
