"""LoRA of single experts as it was saved before transformers 5, against the base with the deltas added by hand.

PEFT converts such files when it loads them, but not all: some it refuses, and for some it forgets alpha_pattern or,
with rsLoRA, that the rank it doubles stands under a root. What counts is what was trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.kind_matrix import Found, mismatches
from tests.local_engine import LocalEngine
from tests.oracle import load_alone, load_fresh, load_plain, logprobs_alone, save_tiny_model

EQUAL, OTHER_SCALE = "equal", "another scale"
NUM_EXPERTS = 4
PARTS = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)}
Rule = Callable[[int, int, str], tuple[int, float] | None]  # (layer, expert, name) -> (rank, scale), if it is adapted


@dataclass(frozen=True)
class Case:
    """Settings, and what they mean by our own reading."""

    settings: Mapping[str, Any]
    rule: Rule
    router: tuple[int, float] | None = None
    attention: tuple[int, float] | None = None
    dtype: torch.dtype = torch.float32
    in_peft: str = EQUAL  # what becomes of it in today's PEFT on today's transformers; else a part of the error


_PATTERNED = {"w1": (2, 4.0), "w3": (4, 0.75)}
CASES = {
    "gate and down, not up": Case(
        {"target_modules": ["w1", "w2"]},
        lambda layer, expert, name: None if name == "w3" else (4, 2.0),
        in_peft="without also targeting w3",
    ),
    "up alone": Case(
        {"target_modules": ["w3"]},
        lambda layer, expert, name: (4, 2.0) if name == "w3" else None,
        in_peft="without also targeting w1",
    ),
    "rsLoRA": Case(
        {"target_modules": ["w1", "w2", "w3"], "use_rslora": True},
        lambda layer, expert, name: (4, 8 / math.sqrt(4)),
        in_peft=OTHER_SCALE,
    ),
    "patterns of rank and alpha": Case(
        {
            "target_modules": ["w1", "w2", "w3"],
            "rank_pattern": {"w1": 2, r"layers\.1\.block_sparse_moe\.experts\.3\.w2": 6},
            "alpha_pattern": {"w3": 3},
        },
        lambda layer, expert, name: _PATTERNED.get(name) or ((6, 8 / 6) if (layer, expert) == (1, 3) else (4, 2.0)),
        in_peft="each tensor to be equal size",
    ),
    "patterns in bfloat16": Case(
        {"target_modules": ["w1", "w3"], "alpha_pattern": {"w3": 3}},
        lambda layer, expert, name: None if name == "w2" else (4, 2.0 if name == "w1" else 0.75),
        dtype=torch.bfloat16,
        in_peft=OTHER_SCALE,
    ),
    "alpha of zero": Case(
        {"target_modules": ["w1", "w3"], "alpha_pattern": {"w1": 0}},
        lambda layer, expert, name: None if name == "w2" else (4, 0.0 if name == "w1" else 2.0),
        in_peft=OTHER_SCALE,
    ),
    "some experts of one layer": Case(
        {"target_modules": r".*\.layers\.1\..*experts\.[02]\.w[13]"},
        lambda layer, expert, name: (4, 2.0) if layer == 1 and expert in (0, 2) and name != "w2" else None,
        in_peft="not found in the base model",
    ),
    "one layer": Case(
        {"target_modules": ["w1", "w2", "w3", "gate"], "layers_to_transform": [0]},
        lambda layer, expert, name: (4, 2.0) if layer == 0 else None,
        router=(4, 2.0),
    ),
    "all but one expert": Case(
        {"target_modules": ["w1", "w2", "w3"], "exclude_modules": ["experts.1.w2"]},
        lambda layer, expert, name: None if (expert, name) == (1, "w2") else (4, 2.0),
        in_peft="size mismatch",
    ),
    "all-linear": Case(
        {"target_modules": "all-linear"}, lambda layer, expert, name: (4, 2.0), router=(4, 2.0), attention=(4, 2.0)
    ),
    "router alone": Case({"target_modules": ["gate"]}, lambda layer, expert, name: None, router=(4, 2.0)),
}


def adapted(case: Case, model: Any) -> Iterator[tuple[str, torch.Tensor, tuple[int, float]]]:
    """Old path, the part of the base's weight that it was, rank and scale."""
    for number, layer in enumerate(model.model.layers):
        old, experts = f"model.layers.{number}.block_sparse_moe", layer.mlp.experts
        for expert in range(NUM_EXPERTS):
            for name, (parameter, part) in PARTS.items():
                weight = getattr(experts, parameter).data[expert]
                if (found := case.rule(number, expert, name)) is not None:
                    halves = weight.chunk(2) if parameter == "gate_up_proj" else [weight]
                    yield f"{old}.experts.{expert}.{name}", halves[part], found
        if case.router is not None and number in case.settings.get("layers_to_transform", [0, 1]):
            yield f"{old}.gate", layer.mlp.gate.weight.data, case.router
        for name in ("q_proj", "k_proj", "v_proj", "o_proj") if case.attention is not None else ():
            path = f"model.layers.{number}.self_attn.{name}"
            yield path, model.get_submodule(path).weight.data, case.attention or (0, 0.0)


def save_and_merge(case: Case, model_folder: Path, folder: Path) -> Any:
    """Writes the checkpoint; the base with its deltas added in float32."""
    model = load_fresh(model_folder)
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for path, weight, (rank, scale) in adapted(case, model):
        a, b = (torch.randn(size, generator=generator) * 0.2 for size in ((rank, weight.shape[1]), (len(weight), rank)))
        a, b = a.to(case.dtype), b.to(case.dtype)
        weight += scale * b.float() @ a.float()
        tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **case.settings}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return model


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Found, torch.Tensor, torch.Tensor]]:
    """By case: what the engine answered in a mixed batch, the truth, and what the base would have said."""
    folder = tmp_path_factory.mktemp("single_experts")
    model = save_tiny_model("mixtral", folder / "model")
    oracles = {name: save_and_merge(case, model, folder / name) for name, case in CASES.items()}
    engine = LocalEngine(model, {name: folder / name for name in CASES}, max_loras=4, max_num_seqs=8, block_size=4)
    prompt = torch.randint(3, 97, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    requests = [engine.request(prompt, name, max_tokens=6, ignore_eos=True, logprobs=1) for name in CASES]
    found = {}
    for name, answer in zip(CASES, engine.run(requests), strict=True):
        truth, base = (logprobs_alone(m, prompt, answer.token_ids)[20:-1] for m in (oracles[name], load_fresh(model)))
        logprobs = [item.logprob for item in answer.logprobs if item is not None]
        found[name] = Found(answer.token_ids, logprobs), truth, base
    return found


@pytest.mark.parametrize("name", CASES)
def test_deltas_by_hand_are_those_of_peft_where_it_loads_them_with_the_scale_of_the_training(
    name: str, tmp_path: Path
) -> None:
    model, prompt = save_tiny_model("mixtral", tmp_path / "model"), list(range(5, 26))
    truth = logprobs_alone(save_and_merge(CASES[name], model, tmp_path / "adapter"), prompt)
    if CASES[name].in_peft in (EQUAL, OTHER_SCALE):
        found = logprobs_alone(load_alone(model, tmp_path / "adapter"), prompt)
        assert torch.allclose(found, truth, atol=1e-3) == (CASES[name].in_peft == EQUAL)
    else:
        with pytest.raises((ValueError, RuntimeError), match=CASES[name].in_peft):
            load_alone(model, tmp_path / "adapter")


@pytest.mark.parametrize("name", CASES)
def test_single_experts_act_as_they_were_trained(
    name: str, answers: Mapping[str, tuple[Found, torch.Tensor, torch.Tensor]]
) -> None:
    found, truth, base = answers[name]
    assert mismatches(found, truth) == []
    assert mismatches(found, base)


def test_experts_of_sizes_that_torchs_grouped_product_refuses_are_served(tmp_path: Path) -> None:
    model = save_tiny_model("qwen3_moe", tmp_path / "model", moe_intermediate_size=18)
    engine = LocalEngine(model)
    (answer,) = engine.run([engine.request([5, 17, 40, 8], None, max_tokens=6, ignore_eos=True, logprobs=2)])
    plain = load_plain(model)
    plain.set_experts_implementation("eager")
    truth = logprobs_alone(plain, [5, 17, 40, 8], answer.token_ids)[3:-1]
    assert answer.token_ids == truth.argmax(-1).tolist()
    found = torch.tensor([item.logprob for item in answer.logprobs if item is not None])
    assert torch.allclose(found, truth.max(-1).values, atol=1e-3)
