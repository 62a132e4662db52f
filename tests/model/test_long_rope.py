"""Rows on both sides of LongRoPE's boundary in one batch: each answers as transformers' `generate` does alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import ONE_ROPE, LongRope
from lora_serve.model.loading.positions import find_positions, position_calls, serve_by_row
from lora_serve.model.step_context import StepContext, StepInputs
from tests.local_engine import Answer, LocalEngine
from tests.model.tiny import step_of
from tests.oracle import load_alone, load_fresh, logprobs_alone, save_adapter, save_tiny_model
from tests.peft_kinds import INVOCATION
from tests.pooling_models import assert_close, hidden_alone, how_of, load_base, pooled, run, save_pooling_model

BOUNDARY = 256
FACTORS = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 6.0, 8.0]}
OF_PHI3 = {"original_max_position_embeddings": BOUNDARY, "rope_parameters": FACTORS}  # `generate` computes it anew
OF_LLAMA = {"rope_parameters": {**FACTORS, "original_max_position_embeddings": BOUNDARY}}  # `generate` keeps K and V
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0, "num_local_experts": 2}
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
    def __init__(self, architecture: str, folder: Path, limits: Mapping[str, Any] = LIMITS, **config: Any) -> None:
        """`config`: of the model, beside its long factors; invocation tokens are the adapter's."""
        activation = {name: config.pop(name) for name in list(config) if name.startswith("alora")}
        config = {**(OF_PHI3 if architecture == "phi3" else OF_LLAMA), **config}
        self.model = save_tiny_model(architecture, folder / "m", max_position_embeddings=1024, **config)
        self.adapter = save_adapter(self.model, folder / "a", **activation)
        self.engine = LocalEngine(self.model, {"a": self.adapter}, **limits)
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
    world = World(architecture, tmp_path, {**LIMITS, "speculate": "off"})
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
    tight = {"kv_cache_memory": "136KiB", "max_model_len": 440, "swap_space": swap_space}
    world = World(architecture, tmp_path, {**LIMITS, **tight})
    rows = [(tokens(BOUNDARY - 3 - 5 * i, i), "a" if i % 2 else None, 40) for i in range(6)]
    world.ask(*rows, (tokens(400, 9), None, 12))
    assert world.engine.engine.stats().num_preemptions > 0


def test_a_model_served_below_the_boundary_has_none(tmp_path: Path) -> None:
    world = World("phi3", tmp_path, {**LIMITS, "max_model_len": BOUNDARY})
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


@pytest.mark.parametrize(("architecture", "recomputes"), [("phi3", True), ("phimoe", True), ("llama", False)])
def test_each_token_has_the_numbers_of_its_own_row(architecture: str, recomputes: bool) -> None:
    """Also where the scale of the rotated heads differs, as Phi-MoE's `short_mscale` and `long_mscale`."""
    scales = {"short_mscale": 1.1, "long_mscale": 1.4} if architecture == "phimoe" else {}
    own = OF_PHI3 if architecture == "phi3" else {"rope_parameters": {**OF_LLAMA["rope_parameters"], **scales}}
    config = AutoConfig.for_model(architecture, **SMALL, **own)
    module = AutoModelForCausalLM.from_config(config).eval()
    rotary = module.model.rotary_emb
    hidden, rows = torch.zeros(1, 1, 32), [torch.arange(20), torch.arange(400), torch.arange(255, 258)]
    with position_calls(module) as calls:
        rotary(hidden, position_ids=rows[0][None])
    alone = [rotary(hidden, row[None]) for row in rows[:2]]
    alone += [[torch.cat([rotary(hidden, one[None, None])[i] for one in rows[2]], 1) for i in (0, 1)]]  # a token a call
    long_rope, by_call = find_positions(module, calls, 1024)
    assert (long_rope, by_call) == (LongRope(BOUNDARY, recomputes), (rotary,))
    context = StepContext[StepInputs]()
    serve_by_row(by_call, long_rope.boundary, context)
    positions = torch.cat(rows)[None]
    is_long = torch.cat([torch.full((1, len(row)), int(len(row) > 300)) for row in rows], 1)
    with context.running(replace(step_of([(0, positions.shape[1], [1])]), is_long=is_long)):
        mixed = rotary(hidden, positions)
    for found, parts in zip(mixed, zip(*alone, strict=True), strict=True):
        assert torch.equal(found, torch.cat(parts, 1))


@pytest.mark.nightly
def test_activated_lora_finds_the_base_models_blocks_of_its_own_kind_alone(tmp_path: Path) -> None:
    world = World("phi3", tmp_path, alora_invocation_tokens=INVOCATION)
    start = tokens(BOUNDARY - 20, 1)
    short, long = [*start, *INVOCATION, 9, 8], [*start, *tokens(90, 2), *INVOCATION, 9, 8]
    world.ask((short, None, 2))
    (first,) = world.ask((long, "a", 4))
    assert first.num_cached_tokens == 0
    world.ask((long, None, 2))
    cached = [answer.num_cached_tokens for answer in world.ask((short, "a", 4), (long, "a", 4))]
    assert cached[0] > 200
    assert cached[1] > BOUNDARY


@pytest.mark.nightly
def test_layers_with_and_without_long_factors(tmp_path: Path) -> None:
    """Gemma 3's way: layers of two kinds turn their positions each by parameters of its own."""
    full = {**OF_LLAMA["rope_parameters"], "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    by_kind = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": full}
    kinds = ["sliding_attention", "full_attention"]
    world = World("gemma3_text", tmp_path, rope_parameters=by_kind, layer_types=kinds)
    world.ask((tokens(20), None, 8), (tokens(600, 1), "a", 8), (tokens(BOUNDARY - 4, 2), None, 12))


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_pooled_rows_choose_by_their_own_lengths(family: str, tmp_path: Path) -> None:
    own = OF_PHI3 if family == "phi3" else OF_LLAMA
    folder = save_pooling_model(family, "embed", tmp_path / "m", max_position_embeddings=1024, **own)
    engine, plain = LocalEngine(folder, task="embed", max_num_batched_tokens=2048), load_base(folder, "embed")
    rows = [tokens(20), tokens(600, 1), tokens(BOUNDARY, 2), tokens(BOUNDARY + 1, 3)]
    truth = [pooled(hidden_alone(plain, row), how_of("llama")) for row in rows]
    assert_close(run(engine, [(row, None) for row in rows]), truth)


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
