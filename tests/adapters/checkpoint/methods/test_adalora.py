from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from lora_serve.adapters.checkpoint.methods import adalora
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import LinearShape
from tests.adapters.checkpoint.methods.peft_oracle import (
    TOKENS,
    Adapter,
    assert_same_deltas,
    assert_same_logits,
    converted,
    llama,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

KEPT = {
    "model.layers.0.self_attn.q_proj": [True, False, True, True],
    "model.layers.0.mlp.down_proj": [False, False, False, True],
    "model.layers.1.self_attn.q_proj": [False, False, False, False],
}


@pytest.fixture(params=[8, 0], ids=["alpha 8", "no alpha"])
def pruned(request: pytest.FixtureRequest, tmp_path: Path) -> Adapter:
    """Trained at rank 4 and pruned by PEFT itself to the directions in KEPT; one layer is left at rank 4."""
    config = peft.AdaLoraConfig(
        total_step=9,
        init_r=4,
        lora_alpha=request.param,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={f"{module}.lora_E.default": mask for module, mask in KEPT.items()},
        task_type="CAUSAL_LM",
    )
    return trained(config, tmp_path)


def test_pruned_layers_keep_the_divisor_of_the_start_rank(pruned: Adapter) -> None:
    table = converted(adalora, pruned)
    assert {module: factors.a.shape[0] for module, factors in table.items()} == {
        "model.layers.0.self_attn.q_proj": 3,
        "model.layers.0.mlp.down_proj": 1,
        "model.layers.1.self_attn.q_proj": 0,
        "model.layers.1.mlp.down_proj": 4,
    }
    assert_same_deltas(table, pruned)
    assert_same_logits(table, pruned)


def test_a_pattern_with_the_adapters_name_in_its_keys_means_the_same(pruned: Adapter) -> None:
    ranks = adalora.parse(pruned.config).ranks
    named = {key + ".default": mask for key, mask in pruned.config["rank_pattern"].items()}
    assert adalora.parse(pruned.config | {"rank_pattern": named}).ranks == ranks
    assert ranks == {module: sum(mask) for module, mask in KEPT.items()}


@pytest.mark.parametrize(
    "pattern",
    [
        {"q_proj.lora_E": [True, False]},
        {"q_proj.lora_E": 2},
        {"q_proj.lora_E": [1, 0, 1, 1]},
        {"q_proj": [True, False, True, True]},
        {"q.lora_E": [True] * 4, "q.lora_E.default": [True] * 4},
        [True],
    ],
)
def test_a_rank_pattern_that_is_no_mask_per_layer_is_refused(pattern: Any) -> None:
    table = {"peft_type": "ADALORA", "init_r": 4, "lora_alpha": 8, "rank_pattern": pattern}
    with pytest.raises(InvalidAdapterError, match="rank_pattern"):
        adalora.parse(table)


def test_a_rank_pattern_for_a_layer_that_is_not_adapted_is_refused() -> None:
    table = {"peft_type": "ADALORA", "init_r": 1, "lora_alpha": 8, "rank_pattern": {"q_proj.lora_E": [True]}}
    config = adalora.parse(table)
    with pytest.raises(InvalidAdapterError, match="'q_proj'"):
        adalora.plan(config, {"k_proj": LinearShape(2, 2)})


def test_tensors_of_the_start_rank_do_not_fit_a_pruned_layer(pruned: Adapter) -> None:
    plan = adalora.plan(adalora.parse(pruned.config), pruned.linears())
    shapes = {"lora_A": (4, 24), "lora_B": (24, 4), "lora_E": (4, 1)}
    assert adalora.bind(plan, "model.layers.0.self_attn.q_proj", shapes, 24, 24) == [
        f"{role} of model.layers.0.self_attn.q_proj has shape {list(shapes[role])}, but the config and the base "
        f"model's layer ask for {asked}"
        for role, asked in {"lora_A": [3, 24], "lora_B": [24, 3], "lora_E": [3, 1]}.items()
    ]


def test_a_checkpoint_of_pefts_own_pruning_schedule_is_converted(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        llama(),
        peft.AdaLoraConfig(
            total_step=4, tinit=1, tfinal=1, init_r=6, target_r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"
        ),
    )
    train(model)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    oracle = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    adapter = Adapter(tmp_path, oracle, llama(), settings, tensors)
    table = converted(adalora, adapter)
    assert sum(factors.a.shape[0] for factors in table.values()) == 4
    assert_same_deltas(table, adapter)


def train(model: Any) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(4):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
