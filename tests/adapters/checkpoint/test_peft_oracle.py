"""PEFT itself, on a tiny Llama, says which modules are adapted, at which scale, and by which delta."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import LlamaConfig, LlamaForCausalLM

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.peft_config import parse_config, targeted
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.model.lora.validation import check_values
from tests.loading import load_adapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 16},
    "all-linear": {"target_modules": "all-linear", "r": 3, "lora_alpha": 5},
    "rslora": {"target_modules": ["o_proj", "down_proj"], "r": 8, "lora_alpha": 12, "use_rslora": True},
    "regex": {"target_modules": r".*\.layers\.1\.(self_attn\.[qk]_proj|mlp\.up_proj)", "r": 2},
    "risky regex": {"target_modules": r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)", "r": 2},
    "one layer": {"target_modules": ["q_proj"], "r": 2, "layers_to_transform": 1},
    "layers by pattern": {
        "target_modules": ["up_proj"],
        "layers_to_transform": [0],
        "layers_pattern": "layers",
        "r": 2,
    },
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["down_proj", "0.self_attn.q_proj"], "r": 2},
    "excluded by regex": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*0.*k_proj", "r": 2},
    "rank and alpha patterns": {
        "target_modules": ["q_proj", "k_proj", "gate_proj"],
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {r"^model\.layers\.0\.self_attn\.k_proj": 5, "layers.1.*": 6, "q_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 3, "self_attn.*": 20},
    },
    "patterns with rslora": {
        "target_modules": "all-linear",
        "r": 4,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2, "proj": 3, r"self_attn\.(q|k)_proj": 9},
        "alpha_pattern": {"mlp.*_proj": 7, "nowhere": 3},
    },
    "start values only": {"target_modules": ["q_proj"], "r": 4, "init_lora_weights": "gaussian"},
    "head too": {"target_modules": ["lm_head", "q_proj"], "r": 4},
}


def tiny_llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **shape))


def saved(model: Any, folder: Path) -> dict[str, LoraLayer]:
    """Save with non-zero weights; the LoRA layers, as PEFT loads them again, by path in the base model."""
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    model.save_pretrained(folder, save_embedding_layers=False)
    return lora_layers(peft.PeftModel.from_pretrained(tiny_llama(), folder))


def lora_layers(model: Any) -> dict[str, LoraLayer]:
    return {name: layer for name, layer in model.base_model.model.named_modules() if isinstance(layer, LoraLayer)}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_modules_ranks_scales_and_deltas_are_pefts_own(
    settings: dict[str, Any], spec: ModelSpec, tmp_path: Path
) -> None:
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    layers = saved(model, tmp_path)

    artifact = read_artifact(tmp_path, spec)
    check_values(tmp_path, artifact)
    ref = AdapterRef("t", "t/a", 1, artifact.digest, 4, 0)
    adapter = load_adapter(tmp_path, ref, spec)

    assert adapter.linears.keys() == layers.keys()
    assert targeted(artifact.config, tuple(spec.linears)) == layers.keys()
    assert adapter.rank == max(layer.r["default"] for layer in layers.values())
    for path, layer in layers.items():
        module = adapter.linears[path]
        assert module.a.shape[0] == layer.r["default"]
        assert module.scale == layer.scaling["default"]
        torch.testing.assert_close(module.scale * (module.b.T @ module.a), layer.get_delta_weight("default"))


def test_literal_all_linear_means_what_peft_expands_it_to(spec: ModelSpec, tmp_path: Path) -> None:
    saved(
        peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")), tmp_path
    )
    path = tmp_path / "adapter_config.json"
    table = json.loads(path.read_text())
    literal = parse_config(json.dumps(table | {"target_modules": "all-linear"}).encode())
    assert targeted(literal, tuple(spec.linears)) == set(table["target_modules"])


REFUSED: dict[str, dict[str, Any]] = {
    "by a random decomposition": {"init_lora_weights": "pissa_niter_2"},
    "layer replication": {"layer_replication": [[0, 2], [1, 2]]},
    "belongs to no module": {"target_modules": ["embed_tokens", "q_proj"]},
}


@pytest.mark.parametrize(("words", "settings"), REFUSED.items(), ids=REFUSED.keys())
def test_what_peft_saves_and_we_cannot_serve_is_refused_in_words(
    words: str, settings: dict[str, Any], spec: ModelSpec, tmp_path: Path
) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, **({"target_modules": ["q_proj"]} | settings))
    peft.get_peft_model(tiny_llama(), config).save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(InvalidAdapterError, match=words):
        read_artifact(tmp_path, spec)
